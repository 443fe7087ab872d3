"""Runs commands in processes that have torch and transformers imported, which takes longer than most commands do.

As a script, the process that imports them and forks itself for each command that it gets from its standard input, a
socket. It imports nothing of auto3d's: a command imports that for itself, in its own folder and environment.
"""

import json
import os
import runpy
import signal
import socket
import subprocess
import sys
from contextlib import suppress
from importlib import import_module
from pathlib import Path

IMPORTED = ("torch.export", "transformers.models.gpt2.modeling_gpt2")
HASHES = {"PYTHONHASHSEED": "0"}  # with which auto3d else begins again
LARGEST = 2**17  # bytes of a command with its environment


class Preloaded:
    """The importing process of the Python in ``programs``, a folder of an environment; closed by ``close``."""

    def __init__(self, programs: Path) -> None:
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._process = subprocess.Popen(
            [programs / "python", __file__], env=os.environ | HASHES, stdin=theirs, stdout=subprocess.DEVNULL
        )
        theirs.close()

    def run(self, command: list[str], folder: Path, environment: dict[str, str], output: int, timeout_s: float) -> int:
        """The exit code of ``command``, a script of Python with arguments, which writes all to the file ``output``.

        It is negative for a signal; after ``timeout_s`` the processes of the command are ended and TimeoutError is
        raised.
        """
        request = json.dumps({"command": command, "folder": str(folder), "environment": environment | HASHES}).encode()
        assert len(request) <= LARGEST
        socket.send_fds(self._socket, [request], [output])
        pid = int(self._answer())
        self._socket.settimeout(timeout_s)
        try:
            return int(self._answer())
        except TimeoutError:
            with suppress(ProcessLookupError):
                os.killpg(pid, signal.SIGKILL)
            self._socket.settimeout(None)
            self._answer()
            raise TimeoutError(f"{' '.join(command)}: no end within {timeout_s:g} s") from None

    def close(self) -> None:
        self._socket.close()
        self._process.wait()

    def _answer(self) -> bytes:
        answer = self._socket.recv(LARGEST)
        assert answer, "the process that imports for commands has ended"
        return answer


def next_command() -> list[str]:
    """Wait for commands; returns in a process for each."""
    here = socket.socket(fileno=os.dup(0))
    while True:
        request, files, _, _ = socket.recv_fds(here, LARGEST, 1)
        if not request:
            sys.exit()
        pid = os.fork()
        if not pid:
            break
        here.send(str(pid).encode())
        os.close(files[0])
        _, status = os.waitpid(pid, 0)
        here.send(str(os.waitstatus_to_exitcode(status)).encode())
    here.close()
    os.setsid()
    known = json.loads(request)
    os.chdir(known["folder"])
    os.environ.clear()
    os.environ.update(known["environment"])
    for file in (1, 2):
        os.dup2(files[0], file)
    os.close(files[0])
    with open(os.devnull) as nothing:
        os.dup2(nothing.fileno(), 0)
    return known["command"]


if __name__ == "__main__":
    for name in IMPORTED:
        import_module(name)
    sys.argv = next_command()
    sys.path[0] = str(Path(sys.argv[0]).parent)
    runpy.run_path(sys.argv[0], run_name="__main__")
