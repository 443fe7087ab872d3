"""Processes of Python that have torch and transformers imported from their start: most commands take less time.

As a script, the process that imports them and forks itself for each process that it is asked for, on a socket, which is
its standard input. It imports nothing of auto3d's: a command imports that for itself, in its own folder and with an
environment of its own. What it forks becomes the child of who asks, as if that had started it: the process between them
ends at once, and the kernel gives its child to the nearest ancestor that takes orphans (PR_SET_CHILD_SUBREAPER in
prctl(2)).
"""

import _posixsubprocess
import atexit
import ctypes
import fcntl
import gc
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import Any, NoReturn

IMPORTED = (
    *("torch.export", "transformers.models.gpt2.modeling_gpt2"),
    *("networkx", "omegaconf", "pydantic", "click", "tabulate", "rich.console", "rich.progress", "rich.table"),
)
SCRIPT = "forked_script.py"  # name of a test's script that may be forked too
HASHES = {"PYTHONHASHSEED": "0"}  # with which auto3d else begins again
LARGEST = 2**17  # bytes of a command with its environment
FILES = 64
DIES_WITH_PARENT, HAS_NAME, TAKES_ORPHANS = 1, 15, 36  # options of prctl(2)
READ_AT_START = ("PYTHON", "OMP_", "MKL_", "KMP_", "LD_", "MALLOC_")  # variables that a process reads once
NOT_READ = ("PYTHONHASHSEED", "OMP_NUM_THREADS")  # the one is that of HASHES, and the other is set anew
ENVIRONMENT = dict(os.environ)
CONTROL: Callable[..., int] = ctypes.CDLL(None).prctl


class Preloaded:
    """The importing process behind a socket; this process is its ancestor."""

    def __init__(self, there: socket.socket, variables: Mapping[str, str] = HASHES) -> None:
        """``variables`` are added to the environment of what it starts."""
        self._socket, self._variables = there, dict(variables)
        self._lock, self._owner = threading.Lock(), os.getpid()

    @classmethod
    def of(cls, programs: Path) -> "Preloaded":
        """Start that of the Python in ``programs``, a folder of an environment; it ends with this process."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        command = [programs / "python", __file__]
        subprocess.Popen(command, env=ENVIRONMENT | HASHES, stdin=theirs, stdout=subprocess.DEVNULL)
        theirs.close()
        return cls(ours)

    def takes(self, environment: Any) -> bool:
        """Whether a process with ``environment`` would be the same as if Python had started anew, in this process."""
        return os.getpid() == self._owner and read_at_start(environment) == read_at_start(ENVIRONMENT)

    def start(
        self,
        words: Sequence[str],
        folder: str,
        environment: dict[str, str],
        files: dict[int, int],
        *,
        session: bool = False,
        mask: Sequence[int] = (),
    ) -> int:
        """The id of a new child of this process, which runs the arguments ``words`` of Python.

        ``files`` are its descriptors and those of this process which they are copies of.
        """
        asked = {
            "words": [*words],
            "folder": folder,
            "environment": environment | self._variables,
            "files": [*files],
            "session": session,
            "mask": [*map(int, mask)],
            "starts": not is_started(words),
        }
        request = json.dumps(asked).encode()
        assert len(request) <= LARGEST
        with self._lock:
            CONTROL(TAKES_ORPHANS, 1)
            try:
                socket.send_fds(self._socket, [request], [*files.values()])
                answer = self._socket.recv(LARGEST)
            finally:
                CONTROL(TAKES_ORPHANS, 0)
        assert answer, "the process that imports for others has ended"
        return int(answer)

    def run(self, command: list[str], folder: Path, environment: dict[str, str], output: int, timeout_s: float) -> int:
        """The exit code of ``command``, a script of Python with arguments, which writes all to the file ``output``.

        It is negative for a signal; after ``timeout_s`` the processes of the command are ended and TimeoutError is
        raised.
        """
        with open(os.devnull) as nothing:
            files = {0: nothing.fileno(), 1: output, 2: output}
            pid = self.start(command, str(folder), environment, files, session=True)
        ended = os.pidfd_open(pid)
        try:
            if not select.select([ended], [], [], timeout_s)[0]:
                os.killpg(pid, signal.SIGKILL)
                raise TimeoutError(f"{' '.join(command)}: no end within {timeout_s:g} s")
        finally:
            os.close(ended)
            _, status = os.waitpid(pid, 0)
        return os.waitstatus_to_exitcode(status)


def read_at_start(environment: Any) -> dict[str, str]:
    return {
        name: value for name, value in environment.items() if name.startswith(READ_AT_START) and name not in NOT_READ
    }


def is_started(words: Sequence[str]) -> bool:
    """Whether ``words`` are those by which auto3d starts a process for trials, captures or comparisons."""
    return [*words[:2]] == ["-m", "launch.executors"] or any("spawn_main" in word for word in words[:2])


def is_of_auto3d(words: Sequence[str]) -> bool:
    """Whether ``words`` are those of the command line, of what it starts, or of a SCRIPT."""
    return is_started(words) or "".join(words[:1]).endswith(("bin/auto3d", SCRIPT))


def divert(preloaded: Callable[[], Preloaded], takes: Callable[[Sequence[str]], bool] = is_of_auto3d) -> None:
    """Have ``preloaded()`` start the processes of Python that this process would else start, where it ``takes`` their
    arguments."""
    real = _posixsubprocess.fork_exec

    def fork_exec(args: Any, programs: Any, close: bool, passed: Any, folder: Any, variables: Any, *rest: Any) -> int:
        words = [os.fsdecode(word) for word in args[1:]]
        while words and words[0] in ("-u", "-B"):
            del words[0]
        stdin, _, _, stdout, _, stderr, _, _, _, session, group, *others = rest
        plain = close and group < 1 and others[:3] == [None] * 3 and others[4] is None
        ours = os.fsdecode(programs[0]) == sys.executable and takes(words)
        if not ours or not plain:
            return real(args, programs, close, passed, folder, variables, *rest)
        environment = dict(os.environ)
        if variables is not None:
            environment = dict(os.fsdecode(each).split("=", 1) for each in variables)
        if not preloaded().takes(environment):
            return real(args, programs, close, passed, folder, variables, *rest)
        standard = {number: number if file < 0 else file for number, file in enumerate((stdin, stdout, stderr))}
        files = standard | {file: file for file in passed if file != rest[7]}  # the last tells of an exec that fails
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, [])
        where = os.fsdecode(folder or os.getcwd())
        return preloaded().start(words, where, environment, files, session=bool(session), mask=[*mask])

    _posixsubprocess.fork_exec = subprocess._fork_exec = fork_exec  # type: ignore[attr-defined]


def new_process(here: socket.socket) -> dict[str, Any]:
    """Wait for requests; returns in a process for each.

    An interrupt of all processes of a command does not end it: it ends with the process that asks.
    """
    interrupt = signal.signal(signal.SIGINT, signal.SIG_IGN)
    while True:
        request, files, _, _ = socket.recv_fds(here, LARGEST, FILES)
        if not request:
            os._exit(0)
        waits, goes_on = os.pipe()
        between = os.fork()
        if not between:
            if os.fork():
                os._exit(0)
            os.close(goes_on)
            os.read(waits, 1)
            break
        os.waitpid(between, 0)
        for file in (waits, goes_on, *files):  # from now on its child has another parent
            os.close(file)
    here.send(str(os.getpid()).encode())
    here.close()
    os.close(waits)
    asked: dict[str, Any] = json.loads(request)
    copies = [fcntl.fcntl(file, fcntl.F_DUPFD_CLOEXEC, 500) for file in files]
    for file in files:
        os.close(file)
    for number, file in zip(asked["files"], copies, strict=True):
        os.dup2(file, number)
        os.close(file)
    if asked["session"]:
        os.setsid()
    signal.signal(signal.SIGINT, interrupt)
    signal.pthread_sigmask(signal.SIG_SETMASK, asked["mask"])
    os.chdir(asked["folder"])
    os.environ.clear()
    os.environ.update(asked["environment"])
    for number, name in enumerate(("stdout", "stderr"), 1):
        older = getattr(sys, name)  # it may take a pipe for a file with positions
        setattr(sys, name, os.fdopen(number, "w", 1, older.encoding, older.errors, closefd=False))
    return asked


def with_its_own(asked: dict[str, Any]) -> dict[str, Any]:
    """``asked``, once what it starts comes from a copy of this process; in what that copy forks, what that is asked."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    if os.fork():
        theirs.close()
        its_own = Preloaded(ours)
        divert(lambda: its_own)
        return asked
    ours.close()
    CONTROL(DIES_WITH_PARENT, signal.SIGKILL)
    return new_process(theirs)


def run_python(words: list[str]) -> None:
    """What Python does with the arguments ``words``.

    A process gets the name of its module, as far as the kernel keeps it: its command line is that of its parent.
    """
    if words[0] == "-m":
        CONTROL(HAS_NAME, words[1].encode())
        sys.argv, sys.path[0] = words[1:], os.getcwd()
        runpy.run_module(words[1], run_name="__main__", alter_sys=True)
    elif words[0] == "-c":
        sys.argv, sys.path[0] = ["-c", *words[2:]], ""
        exec(words[1], {"__name__": "__main__"})
    else:
        sys.argv, sys.path[0] = words, str(Path(words[0]).parent)
        runpy.run_path(words[0], run_name="__main__")


def end(code: object) -> NoReturn:
    """What Python does at its end, except that it destroys no modules, which takes as long as a short command."""
    if code is not None and not isinstance(code, int):
        print(code, file=sys.stderr)
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):  # its reader has gone, or it is closed
            stream.flush()
    os._exit(code & 255 if isinstance(code, int) else code is not None)


def run_and_end(words: list[str]) -> NoReturn:
    try:
        run_python(words)
    except SystemExit as ended:
        end(ended.code)
    except BaseException:
        sys.excepthook(*sys.exc_info())
        end(1)
    end(0)


def starts_cuda() -> NoReturn:
    raise AssertionError("an import begins a FakeTensorMode, which asks CUDA for its devices and so starts it")


if __name__ == "__main__":
    of_torch = import_module("torch._C")
    real, of_torch._ensureCUDADeviceGuardSet = of_torch._ensureCUDADeviceGuardSet, starts_cuda  # type: ignore[attr-defined]
    for name in IMPORTED:
        import_module(name)
    of_torch._ensureCUDADeviceGuardSet = real  # type: ignore[attr-defined]
    gc.freeze()
    asked = new_process(socket.socket(fileno=os.dup(0)))
    while asked.pop("starts", False):
        asked = with_its_own(asked)
    if threads := os.environ.get("OMP_NUM_THREADS"):
        sys.modules["torch"].set_num_threads(int(threads))
    run_and_end(asked["words"])
