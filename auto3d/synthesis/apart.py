"""The exact solver in a process of its own, since OR-tools ends its whole process where one of its own checks fails."""

import pickle
import subprocess
import sys

from auto3d.errors import InputError
from auto3d.synthesis.exact import Optimum, optimum
from auto3d.synthesis.problem import Problem

START_S = 60  # beyond the solver's time: to start, and to build the model
_CODE = "import sys; sys.path[:] = {path!r}; from auto3d.synthesis.apart import answer; answer()"


def optimum_apart(problem: Problem, *, seconds: float) -> Optimum | None:
    """``optimum`` of ``problem``; None if the solver ended without an answer. Raises InputError as ``optimum`` does."""
    command = [sys.executable, "-c", _CODE.format(path=sys.path)]
    try:
        done = subprocess.run(
            command,
            input=pickle.dumps((problem, seconds)),
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            timeout=seconds + START_S,
            check=True,
        )
    except subprocess.SubprocessError:
        return None
    reply = pickle.loads(done.stdout)  # from our own process, through a pipe
    if isinstance(reply, InputError):
        raise reply
    assert isinstance(reply, Optimum)
    return reply


def answer() -> None:
    """Main function of the process: solve the problem of standard input."""
    problem, seconds = pickle.load(sys.stdin.buffer)
    try:
        reply: Optimum | InputError = optimum(problem, seconds=seconds)
    except InputError as error:
        reply = error
    sys.stdout.buffer.write(pickle.dumps(reply))
