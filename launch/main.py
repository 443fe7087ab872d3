"""The entry point of `auto3d`. Exit codes: 0 success, 1 a run failed, 2 bad input, 130 interrupted."""

# This file imports nothing slow, so that an interrupt during the slow imports, which come later, also prints one line.
import gc
import io
import os
import signal
import sys
import traceback
from types import FrameType

from auto3d.garbage import collect_rarely
from launch.commands.exit_codes import BAD_INPUT, INTERRUPTED, complain
from launch.run.end_now import end_now


def run_command() -> None:
    """Run the command in a process of its own; what Python calls for `auto3d`."""
    _fix_hash_seed()
    main()


def main() -> None:
    """Run the command; every expected error ends it with one line on standard error and an exit code."""
    collect_rarely()
    _prepare_streams()
    for number in (signal.SIGINT, signal.SIGTERM):  # SIGTERM counts as an interrupt
        signal.signal(number, _interrupt)
    try:
        code = _run()
        sys.stdout.flush()
    except KeyboardInterrupt:
        code = complain("interrupted", INTERRUPTED)
    except BrokenPipeError:  # the reader of our output has gone, as in `auto3d keys | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        code = 0
    except OSError as error:
        problem = error.strerror or f"{type(error).__name__}: {error}"
        code = complain(f"{error.filename}: {problem}" if error.filename else problem, BAD_INPUT)
    except Exception:
        if not _is_joined():
            raise
        traceback.print_exc()
        code = 1  # Python's own exit code after an exception
    if _is_joined():
        end_now(code)
    if code == INTERRUPTED:  # Python restores default handlers at exit, and a second Ctrl-C would kill it
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_IGN)
    gc.freeze()  # at exit Python would look for garbage among all objects, for more than a second after a search
    sys.exit(code)


def _fix_hash_seed() -> None:
    """Begin this process again with a fixed hash seed, unless the user chose a seed; all that it starts inherit it.

    Python hashes strings by a seed of each process, so a model whose forward goes through a set of strings, as Gemma 3
    does, would have its operations in another order in each process, and a plan would not fit the next capture.
    """
    if "PYTHONHASHSEED" not in os.environ and not sys.flags.ignore_environment and sys.executable:
        os.environ["PYTHONHASHSEED"] = "0"
        os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])


def _run() -> int:
    import click

    from auto3d.errors import InputError
    from launch.commands.group import cli

    try:
        # cli.main() would turn a closed pipe into an exit code of its own.
        with cli.make_context("auto3d", sys.argv[1:]) as context:
            return cli.invoke(context)
    except click.exceptions.Exit as request:  # --help, --version
        return request.exit_code
    except click.ClickException as error:
        return complain(error.format_message(), BAD_INPUT)
    except InputError as error:
        return complain(str(error), BAD_INPUT)


def _is_joined() -> bool:
    """Whether this process has joined process groups with other ranks; it leaves them only after a success."""
    distributed = sys.modules.get("torch.distributed")
    return distributed is not None and distributed.is_available() and distributed.is_initialized()


def _prepare_streams() -> None:
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:  # the stream was closed before we started
            setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115
        elif isinstance(stream := getattr(sys, name), io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # a terminal that cannot show × must not fail us


def _interrupt(number: int, frame: FrameType | None) -> None:
    """End the command at the first interrupt, and ignore later interrupts, which would break its clean-up."""
    for interrupt in (signal.SIGINT, signal.SIGTERM):
        signal.signal(interrupt, lambda number, frame: None)  # Python would report a pending signal under SIG_IGN
    raise KeyboardInterrupt


if __name__ == "__main__":
    run_command()
