"""The way in. Exit codes: 0 done, 1 a run failed, 2 the input cannot be used, 130 interrupted."""

# Only what starts at once is imported here: an interrupt during the imports of seconds is told in one line, too.
import io
import os
import signal
import sys
import traceback
from types import FrameType

from launch.run.end_now import end_now

BAD_INPUT, INTERRUPTED = 2, 130


def main() -> None:
    """Run the command, and turn every expected error into one line and an exit code."""
    _prepare_streams()
    for number in (signal.SIGINT, signal.SIGTERM):  # a polite kill is an interrupt
        signal.signal(number, _interrupt)
    try:
        code = _run()
        sys.stdout.flush()
    except KeyboardInterrupt:
        code = complain("interrupted", INTERRUPTED)
    except BrokenPipeError:  # the reader of our output is gone, as in `auto3d keys | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        code = 0
    except OSError as error:
        what = error.strerror or f"{type(error).__name__}: {error}"
        code = complain(f"{error.filename}: {what}" if error.filename else what, BAD_INPUT)
    except Exception:
        if not _is_joined():
            raise
        traceback.print_exc()
        code = 1  # Python's own exit code after an exception
    if _is_joined():
        end_now(code)
    sys.exit(code)


def _run() -> int:
    import click

    from auto3d.errors import InputError
    from launch.commands import cli

    try:
        # Not cli.main(), which would turn a closed pipe into an exit code of its own.
        with cli.make_context("auto3d", sys.argv[1:]) as context:
            return cli.invoke(context)
    except click.exceptions.Exit as request:  # --help, --version
        return request.exit_code
    except click.ClickException as error:
        return complain(error.format_message(), BAD_INPUT)
    except InputError as error:
        return complain(str(error), BAD_INPUT)


def _is_joined() -> bool:
    """Whether this process is in process groups with other ranks, which it leaves after a success only."""
    distributed = sys.modules.get("torch.distributed")
    return distributed is not None and distributed.is_available() and distributed.is_initialized()


def complain(message: str, code: int) -> int:
    print(f"auto3d: {message}", file=sys.stderr)
    return code


def _prepare_streams() -> None:
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:  # it was closed before we started
            setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115
        elif isinstance(stream := getattr(sys, name), io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # a terminal that cannot show × is no reason to fail


def _interrupt(number: int, frame: FrameType | None) -> None:
    """The first interrupt ends the command; those after it must not break the clean-up, which takes a moment."""
    for each in (signal.SIGINT, signal.SIGTERM):
        signal.signal(each, lambda number, frame: None)  # not SIG_IGN: Python would complain of one that is on its way
    raise KeyboardInterrupt


if __name__ == "__main__":
    main()
