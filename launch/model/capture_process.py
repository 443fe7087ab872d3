"""A process that captures and checks models, or predicts with them, for a driver."""

import os
import signal
from collections.abc import Callable
from contextlib import suppress
from multiprocessing import get_context
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from traceback import format_exc
from typing import Any

from auto3d.errors import InputError
from auto3d.garbage import collect_rarely

_SPAWN = get_context("spawn")  # a fork is unsafe: a driver that shows progress has threads
KILLED = "model: the process that captured it was killed, as the kernel does when memory runs out"


class CaptureProcess:
    """A process that captures and checks models, so that a driver of days need not hold torch and a model in memory.

    It starts at the first call. It is a context manager: at the end of the ``with`` the process has ended.
    """

    def __init__(self) -> None:
        self._process: BaseProcess | None = None
        self._pipe: Connection | None = None

    def __enter__(self) -> "CaptureProcess":
        return self

    def __exit__(self, *_: object) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.join()

    def call(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """The result of ``function(*arguments)`` in that process; ``function`` must be a module's own.

        Raises InputError where the function does, or where the process is killed, and RuntimeError with the traceback
        of any other exception: that is an error of the program, and another call would meet it again.
        """
        if self._pipe is None:
            self._pipe = self._start()
        self._pipe.send((function, arguments))
        try:
            result, refusal, traceback = self._pipe.recv()
        except EOFError:
            refusal, traceback = {"problem": KILLED}, ""
        if traceback:
            raise RuntimeError(f"the process that captures models failed:\n{traceback}")
        if refusal:
            raise InputError(**refusal)
        return result

    def _start(self) -> Connection:
        ours, theirs = _SPAWN.Pipe()
        self._process = _SPAWN.Process(target=_answer, args=(theirs, dict(os.environ)))
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})  # the child inherits this: the driver handles Ctrl-C
        try:
            self._process.start()
        finally:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
        theirs.close()
        return ours


def _answer(pipe: Connection, environment: dict[str, str]) -> None:
    """Main function of the process. The functions that it calls write to the cache themselves."""
    os.environ.clear()  # a forked process has the variables with which its parent began
    os.environ.update(environment)
    collect_rarely()
    with suppress(EOFError, BrokenPipeError):  # the driver has ended
        while True:
            function, arguments = pipe.recv()
            answer: tuple[Any, dict[str, str] | None, str]
            try:
                answer = function(*arguments), None, ""
            except InputError as error:
                answer = None, {"problem": error.problem, "key": error.key, "kind": error.kind}, ""
            except Exception:
                answer = None, None, format_exc()
            pipe.send(answer)
