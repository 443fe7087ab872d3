"""`auto3d capture`, and the Graphs that planning commands work on: from the cache, or captured and put there."""

import os
import resource
import signal
import sys
from contextlib import suppress
from dataclasses import asdict
from math import prod
from multiprocessing import get_context
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from time import perf_counter
from typing import Any

from tabulate import tabulate

from auto3d.capture.cache import Cache
from auto3d.capture.graph import Graph
from auto3d.capture.graph_json import graph_from_json, graph_to_json
from auto3d.errors import InputError
from auto3d.partition.merak import Sharding, shard, sharding_from_json
from launch.output import print_json
from launch.recipe import LoadedRecipe
from launch.settings import device


class PlanningModel:
    """A recipe's model as planning sees it: Graphs and their sharding, without the program that a run needs.

    What the cache holds is not captured, and torch is then never imported. ``fresh``: capture all the same.
    What is not there is captured here, or ``elsewhere``.
    """

    def __init__(self, recipe: LoadedRecipe, *, fresh: bool = False, elsewhere: "Elsewhere | None" = None) -> None:
        self._recipe = recipe
        self._cache = Cache()
        self._fresh = fresh
        self._elsewhere = elsewhere
        self.captured = False  # whether anything was not in the cache

    def graph(self, micro_batch_size: int) -> Graph:
        identity = self.identity(graph_at=micro_batch_size)
        found = None if self._fresh else self._cache.load(identity, graph_from_json)
        if found is not None:
            return found
        self.captured = True
        if self._elsewhere is not None:
            return self._elsewhere.graph(self._recipe, micro_batch_size)
        from launch.model import captured_model

        found = captured_model(self._recipe, micro_batch_size).graph
        self._cache.store(identity, graph_to_json(found))
        return found

    def sharding(self, graph: Graph, subgraphs: int | None = None) -> Sharding:
        """The subgraphs of ``graph``, one of this model's."""
        identity = self.identity(sharding_at=graph.micro_batch_size, subgraphs=subgraphs)
        found = None if self._fresh else self._cache.load(identity, sharding_from_json)
        if found is None:
            found = shard(graph, subgraphs)
            self.captured = True
            self._cache.store(identity, asdict(found))
        return found

    def identity(self, **what: int | None) -> dict[str, Any]:
        """All of the recipe that decides the Graph; a factory is also where Python finds it."""
        values = asdict(self._recipe.values)
        model = {key: value for key, value in values["model"].items() if key != "weights"}
        data = {key: value for key, value in values["data"].items() if key != "files"}
        where = [os.getcwd(), *sys.path] if model["factory"] else []
        return {"model": model, "data": data, "device": device(self._recipe.values), "where": where, **what}


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
                answer = (_checked if check else _captured)(recipe, micro_batch_size), ""
            except InputError as error:
                answer = None, str(error)
            pipe.send(answer)


def _captured(recipe: LoadedRecipe, micro_batch_size: int) -> Any:
    return graph_to_json(PlanningModel(recipe, fresh=True).graph(micro_batch_size))


def _checked(recipe: LoadedRecipe, micro_batch_size: int) -> str:
    from launch.check_capture import check
    from launch.model import captured_model

    return check(recipe, captured_model(recipe, micro_batch_size))


def default_micro_batch_size(recipe: LoadedRecipe) -> int:
    return recipe.values.plan.micro_batch_size if recipe.values.plan else 1


def print_capture(
    recipe: LoadedRecipe,
    *,
    micro_batch_size: int | None,
    subgraphs: int | None,
    fresh: bool,
    check: bool,
    as_json: bool,
) -> None:
    """Capture and shard the recipe's model, and print its figures; ``check`` compares it with the eager module."""
    begin = perf_counter()
    model = PlanningModel(recipe, fresh=fresh)
    graph = model.graph(micro_batch_size or default_micro_batch_size(recipe))
    sharding = model.sharding(graph, subgraphs)
    record = {
        "micro_batch_size": graph.micro_batch_size,
        "parameters": sum(prod(value.shape) for value in graph.parameters.values()),
        "parameter_bytes": sum(value.bytes for value in graph.parameters.values()),
        "flops": sum(node.flops for node in graph.nodes),
        "backward_flops": sum(node.backward_flops for node in graph.nodes),
        "operations": len(graph.nodes),
        "subgraphs": len(sharding.subgraphs),
        "common": sharding.common,
        "first_user": sharding.first_user,
        "seconds": perf_counter() - begin,
        "peak_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        "cached": not model.captured,
        "graph": graph.fingerprint,
    }
    if check:
        record["check"] = _checked(recipe, graph.micro_batch_size)
    if as_json:
        print_json(record)
    else:
        print(_figures(record))


def _figures(record: dict[str, Any]) -> str:
    common = ", ".join(f"{name} ({users})" for name, users in record["common"].items())
    inputs = ", ".join(f"{name} ({subgraph})" for name, subgraph in record["first_user"].items())
    how = "from the cache" if record["cached"] else "captured"
    rows = [
        ("parameters", f"{record['parameters']:,}"),
        ("", f"{record['parameter_bytes'] / 2**30:.3g} GiB"),
        ("forward", f"{record['flops'] / 1e12:.4g} TFLOP per micro-batch of {record['micro_batch_size']}"),
        ("backward", f"{record['backward_flops'] / 1e12:.4g} TFLOP"),
        ("operations", f"{record['operations']:,}"),
        ("subgraphs", f"{record['subgraphs']:,}"),
        ("common nodes (users)", common or "none"),
        ("inputs (first subgraph)", inputs),
        ("time taken", f"{record['seconds']:.2f} s, {how}"),
        ("peak memory taken", f"{record['peak_bytes'] / 2**20:,.0f} MiB"),
    ]
    if "check" in record:
        rows.append(("check", record["check"]))
    return tabulate(rows, tablefmt="plain", disable_numparse=True)
