"""The Graphs that planning commands work on, and how tensor parallelism splits their weights.

They are loaded from the cache, or made and stored there.
"""

import os
import sys
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from json import dumps
from typing import TYPE_CHECKING, Any

from auto3d.capture.cache import Cache
from auto3d.capture.graph import Graph
from auto3d.capture.graph_json import graph_from_json, graph_to_json
from auto3d.partition.merak import Sharding, shard, sharding_from_json
from auto3d.tensor.local_graph import LocalGraph, local_graph, local_graph_from_json, local_graph_to_json
from auto3d.tensor_placement import Split
from launch.model.capture_process import CaptureProcess
from launch.recipe.load import LoadedRecipe
from launch.recipe.schema import UNFUSED
from launch.recipe.settings import device
from launch.run.devices import torch_has_cuda

if TYPE_CHECKING:
    from auto3d.capture.model import CapturedModel

_KEPT = 2  # captured programs that a process keeps
_programs: dict[str, "CapturedModel"] = {}  # the most recent last


class PlanningModel:
    """A recipe's model as planning sees it: Graphs and their sharding, without the program that a run needs.

    A Graph that the cache holds is not captured again, unless ``fresh`` is set, and torch is then never imported. Other
    Graphs are captured in ``process`` if there is one, else in this process; for a GPU, always in another process.
    Costs are those of the runtime, or, if ``predicted`` is set, of the system that the recipe's ``prediction`` names.
    """

    def __init__(
        self,
        recipe: LoadedRecipe,
        *,
        fresh: bool = False,
        process: CaptureProcess | None = None,
        predicted: bool = False,
    ) -> None:
        self._recipe = recipe
        self._cache = Cache()
        self._fresh = fresh
        self._process = process
        self._fused_attention = not (predicted and recipe.values.prediction.attention == UNFUSED)
        self.captured = False  # whether anything was not in the cache

    def graph(self, micro_batch_size: int) -> Graph:
        """The Graph for micro-batches of so many samples; raises InputError where it cannot be captured."""
        identity = self.identity(graph_at=micro_batch_size)
        cached = None if self._fresh else self._cache.load(identity, graph_from_json)
        if cached is not None:
            return cached
        self.captured = True
        if self._process is not None:
            return graph_from_json(self._process.call(self._capture_to_json, self._recipe, micro_batch_size))
        if device(self._recipe.values) == "cuda" and torch_has_cuda():
            # In this process a capture would start CUDA and keep memory of a GPU, which the ranks need.
            with CaptureProcess() as process:
                return graph_from_json(process.call(self._capture_to_json, self._recipe, micro_batch_size))
        return self.captured_here(micro_batch_size)

    def captured_here(self, micro_batch_size: int) -> Graph:
        """The Graph, captured in this process and stored in the cache."""
        from auto3d.capture.describe import describe  # it imports torch, which a cached Graph does without

        identity = self.identity(graph_at=micro_batch_size)  # before the model's code is imported, as in graph()
        captured = captured_program(self._recipe, micro_batch_size, fresh=self._fresh)
        graph = captured.graph if self._fused_attention else describe(captured.exported, fused_attention=False)
        self._cache.store(identity, graph_to_json(graph))
        return graph

    def sharding(self, graph: Graph, subgraphs: int | None = None) -> Sharding:
        """The subgraphs of ``graph``, one of this model's."""
        identity = self.identity(sharding_at=graph.micro_batch_size, subgraphs=subgraphs)
        sharding = None if self._fresh else self._cache.load(identity, sharding_from_json)
        if sharding is None:
            sharding = shard(graph, subgraphs)
            self.captured = True
            self._cache.store(identity, asdict(sharding))
        return sharding

    def split(self, micro_batch_size: int, shards: int, sequence_parallel: bool) -> dict[str, Split]:
        """``Plan.split`` of a plan whose tensor-parallel groups have ``shards`` ranks.

        Raises InputError where the model cannot be captured, or where a rule of the recipe is not possible.
        """
        identity = self._split_identity(micro_batch_size, shards, sequence_parallel)
        cached = None if self._fresh else self._cache.load(identity, _splits_from_json)
        if cached is not None:
            return cached
        arguments = shards, sequence_parallel
        if self._process is not None:
            return _splits_from_json(
                self._process.call(partial(_split_to_json, arguments), self._recipe, micro_batch_size)
            )
        if device(self._recipe.values) == "cuda" and torch_has_cuda():
            with CaptureProcess() as process:
                return _splits_from_json(
                    process.call(partial(_split_to_json, arguments), self._recipe, micro_batch_size)
                )
        return self.split_here(micro_batch_size, *arguments)

    def split_here(self, micro_batch_size: int, shards: int, sequence_parallel: bool) -> dict[str, Split]:
        """As ``split``, made in this process and stored in the cache."""
        from auto3d.tensor.planned_split import planned_split  # it imports torch
        from launch.run.streams import stdout_to_stderr

        identity = self._split_identity(micro_batch_size, shards, sequence_parallel)
        captured = captured_program(self._recipe, micro_batch_size)
        rules = self._recipe.values.model.tensor_parallel
        with stdout_to_stderr():
            split = planned_split(captured, shards, rules=rules, sequence_parallel=sequence_parallel)
        self._cache.store(identity, {name: asdict(each) for name, each in split.items()})
        return split

    def local_graph(self, micro_batch_size: int, shards: int, sequence_parallel: bool) -> LocalGraph:
        """What each of ``shards`` tensor-parallel ranks runs, with the weights split as ``split`` says.

        Raises InputError as ``split`` does.
        """
        identity = self._local_identity(micro_batch_size, shards, sequence_parallel)
        cached = None if self._fresh else self._cache.load(identity, local_graph_from_json)
        if cached is not None:
            return cached
        derive = partial(_local_to_json, (shards, sequence_parallel), predicted=not self._fused_attention)
        if self._process is not None:
            return local_graph_from_json(self._process.call(derive, self._recipe, micro_batch_size))
        if device(self._recipe.values) == "cuda" and torch_has_cuda():
            with CaptureProcess() as process:
                return local_graph_from_json(process.call(derive, self._recipe, micro_batch_size))
        return self.local_graph_here(micro_batch_size, shards, sequence_parallel)

    def local_graph_here(self, micro_batch_size: int, shards: int, sequence_parallel: bool) -> LocalGraph:
        """As ``local_graph``, made in this process and stored in the cache."""
        from auto3d.capture.describe import describe  # they import torch
        from auto3d.tensor.model import tensor_parallel
        from launch.run.streams import stdout_to_stderr

        identity = self._local_identity(micro_batch_size, shards, sequence_parallel)
        split = self.split(micro_batch_size, shards, sequence_parallel)
        captured = captured_program(self._recipe, micro_batch_size)
        with stdout_to_stderr():
            model = tensor_parallel(captured, shards, split=split, sequence_parallel=sequence_parallel)
            graph = None if self._fused_attention else describe(model.local.exported, fused_attention=False)
        local = local_graph(model, graph)
        self._cache.store(identity, local_graph_to_json(local))
        return local

    def _local_identity(self, micro_batch_size: int, shards: int, sequence_parallel: bool) -> dict[str, Any]:
        return {**self._split_identity(micro_batch_size, shards, sequence_parallel), "local": True}

    def _split_identity(self, micro_batch_size: int, shards: int, sequence_parallel: bool) -> dict[str, Any]:
        rules = list(self._recipe.values.model.tensor_parallel.items())
        what = {"shards": shards, "sequence_parallel": sequence_parallel, "rules": rules}
        return {**self.identity(split_at=micro_batch_size), **what}

    def identity(self, **what: int | None) -> dict[str, Any]:
        """Everything in the recipe that the Graph depends on, as a key of the cache; for a factory, also sys.path."""
        values = asdict(self._recipe.values)
        model = {key: value for key, value in values["model"].items() if key not in ("weights", "tensor_parallel")}
        data = {key: value for key, value in values["data"].items() if key != "files"}
        where = [os.getcwd(), *sys.path] if model["factory"] else []
        found = {"model": model, "data": data, "device": device(self._recipe.values), "where": where, **what}
        return found if self._fused_attention else {**found, "attention": UNFUSED}

    @property
    def _capture_to_json(self) -> Callable[[LoadedRecipe, int], Any]:
        return partial(_capture_to_json, predicted=not self._fused_attention)


def _capture_to_json(recipe: LoadedRecipe, micro_batch_size: int, *, predicted: bool) -> Any:
    return graph_to_json(PlanningModel(recipe, predicted=predicted).captured_here(micro_batch_size))


def _split_to_json(arguments: tuple[int, bool], recipe: LoadedRecipe, micro_batch_size: int) -> Any:
    split = PlanningModel(recipe).split_here(micro_batch_size, *arguments)
    return {name: asdict(each) for name, each in split.items()}


def _local_to_json(arguments: tuple[int, bool], recipe: LoadedRecipe, micro_batch_size: int, *, predicted: bool) -> Any:
    model = PlanningModel(recipe, predicted=predicted)
    return local_graph_to_json(model.local_graph_here(micro_batch_size, *arguments))


def _splits_from_json(content: dict[str, Any]) -> dict[str, Split]:
    return {name: Split(dim=each["dim"], blocks=tuple(each["blocks"])) for name, each in content.items()}


def captured_program(recipe: LoadedRecipe, micro_batch_size: int, *, fresh: bool = False) -> "CapturedModel":
    """The recipe's model, captured in this process; the most recent captures are kept for what follows from them."""
    from launch.model.build import captured_model  # it imports torch

    key = dumps(PlanningModel(recipe).identity(graph_at=micro_batch_size), sort_keys=True)
    captured = _programs.pop(key, None)
    if captured is None or fresh:
        captured = captured_model(recipe, micro_batch_size)
    _programs[key] = captured
    for oldest in list(_programs)[:-_KEPT]:
        del _programs[oldest]
    return captured


def default_micro_batch_size(recipe: LoadedRecipe) -> int:
    return recipe.values.plan.micro_batch_size if recipe.values.plan else 1
