"""Captures and checks of models in a process of their own."""

import signal
from collections.abc import Callable, Iterable
from contextlib import suppress
from multiprocessing import get_context
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any

from auto3d.capture.graph import Graph
from auto3d.capture.graph_json import graph_from_json, graph_to_json
from auto3d.errors import InputError
from auto3d.plan import Plan
from auto3d.schedule import samples_at_once
from launch.model import check_capture
from launch.model.graphs import PlanningModel
from launch.recipe.load import LoadedRecipe


class Elsewhere:
    """A process that captures models, and ends: what torch and a model take there, a driver need not hold for days.

    It starts when it is first needed. A context manager: at the end of the ``with`` it is gone.
    """

    def __init__(self) -> None:
        self._process: BaseProcess | None = None
        self._pipe: Connection | None = None

    def __enter__(self) -> "Elsewhere":
        return self

    def __exit__(self, *_: object) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.join()

    def graph(self, recipe: LoadedRecipe, micro_batch_size: int) -> Graph:
        """The Graph of the recipe's model; raises InputError where it cannot be captured."""
        return graph_from_json(self._ask(recipe, micro_batch_size, check=False))

    def check(self, recipe: LoadedRecipe, micro_batch_size: int) -> str:
        """What ``check_capture.check`` says of the recipe's model; raises InputError as it does."""
        return self._ask(recipe, micro_batch_size, check=True)

    def _ask(self, recipe: LoadedRecipe, micro_batch_size: int, *, check: bool) -> Any:
        if self._process is None:
            self._start()
        self._pipe.send((recipe, micro_batch_size, check))
        try:
            content, problem = self._pipe.recv()
        except EOFError:
            problem = "model: the process that captured it was killed, as the kernel does when memory runs out"
        if problem:
            raise InputError(problem)
        return content

    def _start(self) -> None:
        context = get_context("spawn")  # not fork, for whoever shows progress has threads
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_capture_all, args=(theirs,))  # no daemon: a check starts a process
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})  # it inherits this: Ctrl-C is the driver's business
        try:
            self._process.start()
        finally:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
        theirs.close()


def _capture_all(pipe: Connection) -> None:
    """The life of that process. It writes to the cache itself, which notes the sources that were read."""
    with suppress(EOFError, BrokenPipeError):  # the driver is gone
        while True:
            recipe, micro_batch_size, check = pipe.recv()
            try:
                answer = (check_capture.check_at if check else _captured)(recipe, micro_batch_size), ""
            except InputError as error:
                answer = None, str(error)
            pipe.send(answer)


def _captured(recipe: LoadedRecipe, micro_batch_size: int) -> Any:
    return graph_to_json(PlanningModel(recipe).captured_here(micro_batch_size))


def check_plans(recipe: LoadedRecipe, plans: Iterable[Plan], elsewhere: Elsewhere, tell: Callable[[str], None]) -> None:
    """Check the captures that ``plans`` run, in the process ``elsewhere``; ``tell`` hears of each."""
    if not recipe.values.training.check_capture:
        return
    model = PlanningModel(recipe, elsewhere=elsewhere.graph)
    for size in sorted({samples_at_once(plan) for plan in plans}):
        graph = model.graph(size)
        if reason := check_capture.why_not(graph):
            tell(check_capture.not_compared(graph, reason))
        elif not check_capture.is_checked(recipe, graph):
            tell(elsewhere.check(recipe, size))
