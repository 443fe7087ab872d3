"""The Graphs that planning commands work on: from the cache, or captured and put there."""

import os
import sys
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

from auto3d.capture.cache import Cache
from auto3d.capture.graph import Graph
from auto3d.capture.graph_json import graph_from_json, graph_to_json
from auto3d.partition.merak import Sharding, shard, sharding_from_json
from launch.recipe.load import LoadedRecipe
from launch.recipe.settings import device
from launch.run.devices import torch_has_cuda


class PlanningModel:
    """A recipe's model as planning sees it: Graphs and their sharding, without the program that a run needs.

    What the cache holds is not captured, and torch is then never imported. ``fresh``: capture all the same.
    What is not there is captured by ``elsewhere``, a function of the recipe and the micro-batch size, or here; for a
    GPU, in a process of its own.
    """

    def __init__(
        self,
        recipe: LoadedRecipe,
        *,
        fresh: bool = False,
        elsewhere: Callable[[LoadedRecipe, int], Graph] | None = None,
    ) -> None:
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
            return self._elsewhere(self._recipe, micro_batch_size)
        if device(self._recipe.values) == "cuda" and torch_has_cuda():
            # Here it would start CUDA, and hold memory of a GPU that is for the ranks.
            from launch.model.elsewhere import Elsewhere

            with Elsewhere() as elsewhere:
                return elsewhere.graph(self._recipe, micro_batch_size)
        return self.captured_here(micro_batch_size)

    def captured_here(self, micro_batch_size: int) -> Graph:
        """The same, captured in this process and put into the cache."""
        from launch.model.build import captured_model

        identity = self.identity(graph_at=micro_batch_size)  # before the model's code is imported, as in graph()
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


def default_micro_batch_size(recipe: LoadedRecipe) -> int:
    return recipe.values.plan.micro_batch_size if recipe.values.plan else 1
