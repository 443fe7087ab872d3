"""`auto3d capture`, and the Graphs that planning commands work on: from the cache, or captured and put there."""

import os
import resource
import sys
from collections.abc import Callable
from dataclasses import asdict
from math import prod
from time import perf_counter
from typing import Any

from tabulate import tabulate

from auto3d.capture.cache import Cache
from auto3d.capture.graph import Graph
from auto3d.capture.graph_json import graph_from_json, graph_to_json
from auto3d.partition.merak import Sharding, shard, sharding_from_json
from launch.output import print_json
from launch.recipe import LoadedRecipe


class PlanningModel:
    """A recipe's model as planning sees it: Graphs and their sharding, without the program that a run needs.

    What the cache holds is not captured, and torch is then never imported. ``fresh``: capture all the same.
    """

    def __init__(self, recipe: LoadedRecipe, *, fresh: bool = False) -> None:
        self._recipe = recipe
        self._cache = Cache()
        self._fresh = fresh
        self.captured = False  # whether anything was not in the cache

    def graph(self, micro_batch_size: int) -> Graph:
        def capture() -> Graph:
            from launch.model import captured_model

            return captured_model(self._recipe, micro_batch_size).graph

        identity = self._identity(graph_at=micro_batch_size)
        return self._remember(identity, capture, graph_to_json, graph_from_json)

    def sharding(self, graph: Graph, subgraphs: int | None = None) -> Sharding:
        """The subgraphs of ``graph``, one of this model's."""
        identity = self._identity(sharding_at=graph.micro_batch_size, subgraphs=subgraphs)
        return self._remember(identity, lambda: shard(graph, subgraphs), asdict, sharding_from_json)

    def _remember(self, identity: dict, make: Callable, write: Callable, read: Callable) -> Any:
        found = None if self._fresh else self._cache.load(identity, read)
        if found is None:
            found = make()
            self.captured = True
            self._cache.store(identity, write(found))
        return found

    def _identity(self, **what: int | None) -> dict[str, Any]:
        """All of the recipe that decides the Graph; a factory is also where Python finds it."""
        values = asdict(self._recipe.values)
        model = {key: value for key, value in values["model"].items() if key != "weights"}
        data = {key: value for key, value in values["data"].items() if key != "files"}
        where = [os.getcwd(), *sys.path] if model["factory"] else []
        return {"model": model, "data": data, "where": where, **what}


def default_micro_batch_size(recipe: LoadedRecipe) -> int:
    return recipe.values.plan.micro_batch_size if recipe.values.plan else 1


def print_capture(
    recipe: LoadedRecipe, *, micro_batch_size: int | None, subgraphs: int | None, fresh: bool, as_json: bool
) -> None:
    """Capture and shard the recipe's model, and print its figures."""
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
    return tabulate(rows, tablefmt="plain", disable_numparse=True)
