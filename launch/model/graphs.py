"""The Graphs that planning commands work on: the model's, with their split weights, and Graphs of shards and slices.

They are loaded from the cache, or made and stored there.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Any, TypeVar

from auto3d.capture.graph import Graph
from auto3d.capture.graph_json import graph_from_json, graph_to_json
from auto3d.derived.local_graph import LocalGraph, local_graph_from_json, local_graph_to_json, local_graphs
from auto3d.errors import InputError
from auto3d.partition.merak import Sharding, shard, sharding_from_json
from auto3d.share import Share
from auto3d.tensor.known_rules import RULES_KEY
from auto3d.tensor_placement import Split
from launch.model.capture_process import CaptureProcess
from launch.model.identity import cache_of, identity_of
from launch.recipe.load import LoadedRecipe
from launch.recipe.schema import UNFUSED
from launch.recipe.settings import device
from launch.run.devices import torch_has_cuda

if TYPE_CHECKING:
    from auto3d.capture.model import CapturedModel

T = TypeVar("T")

_KEPT = 2  # captured programs that a PlanningModel keeps for what follows from them


@contextmanager
def refused_rules(recipe: LoadedRecipe) -> Iterator[None]:
    """Inside, a rule for the split of weights that the model refuses is an error of the key where ``recipe`` has it."""
    try:
        yield
    except InputError as error:
        if error.key != RULES_KEY:
            raise
        raise recipe.error(f"model.{RULES_KEY}", error.problem) from None


class PlanningModel:
    """A recipe's model as planning sees it: Graphs and their sharding, without the program that a run needs.

    A Graph that the cache holds is not captured again, unless ``fresh`` is set, and torch is then never imported. Other
    Graphs are captured in ``process`` if there is one, else in this process; for a GPU, always in another process.
    Costs are for the runtime or, if ``predicted`` is set, for the system that the recipe's ``prediction`` names.
    """

    def __init__(
        self,
        recipe: LoadedRecipe,
        *,
        fresh: bool = False,
        process: CaptureProcess | None = None,
        predicted: bool = False,
        captured_at: Callable[[int], "CapturedModel"] | None = None,
    ) -> None:
        """``captured_at`` gives captures that this process needs anyway, and their Graphs (default: made as needed)."""
        self._captured_at, self._programs = captured_at, dict[int, "CapturedModel"]()
        self._graphs = dict[int, Graph]()
        self.recipe = recipe
        self._cache = cache_of(recipe)
        self._fresh = fresh
        self.process = process
        self._last_graphs = lru_cache(1)(self.local_graphs)  # the slices of a model are asked for one after the other
        self.fused_attention = not (predicted and recipe.values.prediction.attention == UNFUSED)
        self._elsewhere = partial(_planning_model, predicted=not self.fused_attention, fresh=fresh)
        self.captured = False  # whether anything was not in the cache

    def graph(self, micro_batch_size: int) -> Graph:
        """The Graph for micro-batches of so many samples; raises InputError where it cannot be captured."""
        if micro_batch_size not in self._graphs:
            self._graphs[micro_batch_size] = self._graph(micro_batch_size)
        return self._graphs[micro_batch_size]

    def _graph(self, micro_batch_size: int) -> Graph:
        if self._captured_at is not None:
            return self._captured_at(micro_batch_size).graph
        call = partial(_capture_to_json, self._elsewhere)
        identity = self.identity(graph_at=micro_batch_size)
        return self._made(identity, micro_batch_size, graph_from_json, self.captured_here, call)

    def captured_here(self, micro_batch_size: int) -> Graph:
        """The Graph, captured in this process and stored in the cache."""
        from auto3d.capture.describe import describe  # it imports torch, which a cached Graph does without

        identity = self.identity(graph_at=micro_batch_size)  # before the model's code is imported, as in graph()
        captured = self.program(micro_batch_size)
        graph = captured.graph if self.fused_attention else describe(captured.exported, fused_attention=False)
        self._cache.store(identity, graph_to_json(graph))
        return graph

    def sharding(self, graph: Graph, subgraphs: int | None = None) -> Sharding:
        """The subgraphs of ``graph``, a Graph of this model: ``subgraphs`` of them (default: the recipe's number).

        They are kept by the graph's fingerprint: where the Graph comes from another process or from the cache, this
        process may not have imported the model's code, and the cache would not notice that it changes. Those of an
        interpolated Graph are not stored: at 1 sample it may have other operations than the model has.
        """
        subgraphs = subgraphs or self.recipe.values.search.subgraphs
        if not graph.fingerprint:
            return shard(graph, subgraphs)
        identity = {
            "sharding_of": graph.fingerprint,
            "subgraphs": subgraphs,
            "fused_attention": self.fused_attention,
        }
        sharding = None if self._fresh else self._cache.load(identity, sharding_from_json)
        if sharding is None:
            sharding = shard(graph, subgraphs)
            self.captured = True
            self._cache.store(identity, asdict(sharding))
        return sharding

    def divided_at(self, micro_batch_size: int) -> int:
        """The size at which the model is divided among shares of micro-batches of so many samples."""
        return micro_batch_size

    def split(self, micro_batch_size: int, share: Share) -> dict[str, Split]:
        """``Plan.split`` of a plan whose ranks have ``share`` of the work.

        Raises InputError where the model cannot be captured, or where a rule of the recipe is not possible.
        """
        return self._made(
            self._split_identity(micro_batch_size, share),
            micro_batch_size,
            _splits_from_json,
            lambda size: self.split_here(size, share),
            partial(_split_to_json, self._elsewhere, share),
        )

    def split_here(self, micro_batch_size: int, share: Share) -> dict[str, Split]:
        """As ``split``, made in this process and stored in the cache."""
        from auto3d.derived.planned_split import planned_split  # it imports torch
        from launch.run.streams import stdout_to_stderr

        identity = self._split_identity(micro_batch_size, share)
        captured = self.program(micro_batch_size)
        rules = self.recipe.values.model.tensor_parallel
        with stdout_to_stderr():
            split = planned_split(captured, share, rules=rules)
        self._cache.store(identity, {name: asdict(weight_split) for name, weight_split in split.items()})
        return split

    def local_graphs(self, micro_batch_size: int, share: Share) -> tuple[LocalGraph, ...]:
        """What ranks with ``share`` of the work run, with the weights split as ``split`` says: a program per slice.

        Raises InputError where the model cannot be captured, or cannot be divided so.
        """
        return self._made(
            self._local_identity(micro_batch_size, share),
            micro_batch_size,
            _locals_from_json,
            lambda size: self.local_graphs_here(size, share),
            partial(_locals_to_json, self._elsewhere, share),
        )

    def local_graphs_here(self, micro_batch_size: int, share: Share) -> tuple[LocalGraph, ...]:
        """As ``local_graphs``, made in this process and stored in the cache."""
        from auto3d.derived.of_share import derived  # it imports torch
        from launch.run.streams import stdout_to_stderr

        identity = self._local_identity(micro_batch_size, share)
        split: dict[str, Split] = {}
        if share.tp > 1:
            known = self._cache.load(self._split_identity(micro_batch_size, share), _splits_from_json)
            split = self.split_here(micro_batch_size, share) if known is None else known
        captured = self.program(micro_batch_size)
        with stdout_to_stderr():
            model = derived(captured, share, split=split, fused_attention=self.fused_attention)
        graphs = local_graphs(model)
        self._cache.store(identity, [local_graph_to_json(graph) for graph in graphs])
        return graphs

    def graph_of(self, micro_batch_size: int, share: Share) -> LocalGraph:
        """What an operation runs that does ``share``, any but the whole; raises InputError as ``local_graphs`` does."""
        return self._last_graphs(micro_batch_size, share.of_any_slice)[share.slice_number]

    def program(self, micro_batch_size: int) -> "CapturedModel":
        """The model captured in this process; the most recent captures are kept."""
        from launch.model.build import captured_model  # it imports torch

        captured = self._programs.pop(micro_batch_size, None)
        if captured is None:
            last = next(reversed(self._programs.values()), None)  # it knows what another capture had to find out
            afresh = partial(captured_model, self.recipe, fresh=self._fresh)
            captured = (self._captured_at or (last and last.at_size) or afresh)(micro_batch_size)
        self._programs[micro_batch_size] = captured
        for oldest in list(self._programs)[:-_KEPT]:
            del self._programs[oldest]
        return captured

    def _made(
        self,
        identity: dict[str, Any],
        micro_batch_size: int,
        read: Callable[[Any], T],
        here: Callable[[int], T],
        call: Callable[[LoadedRecipe, int], Any],
    ) -> T:
        """The cache's entry of ``identity``, which ``read`` understands; if there is none, it is made and stored.

        ``here`` makes it in this process; ``call`` makes it in another and gives it as JSON.
        """
        cached = None if self._fresh else self._cache.load(identity, read)
        if cached is not None:
            return cached
        self.captured = True
        if self.process is not None:
            return read(self.process.call(call, self.recipe, micro_batch_size))
        if device(self.recipe.values) == "cuda" and torch_has_cuda():
            # In this process a capture would start CUDA and keep memory of a GPU, which the ranks need.
            with CaptureProcess() as process:
                return read(process.call(call, self.recipe, micro_batch_size))
        return here(micro_batch_size)

    def _local_identity(self, micro_batch_size: int, share: Share) -> dict[str, Any]:
        if share.tp == 1:
            return self.identity(sliced_at=micro_batch_size, slices=share.slices)
        split = self._split_identity(micro_batch_size, share)
        return {**split, "slices": share.slices, "fused_attention": self.fused_attention}

    def _split_identity(self, micro_batch_size: int, share: Share) -> dict[str, Any]:
        rules = list(self.recipe.values.model.tensor_parallel.items())
        identity = {**self.identity(split_at=micro_batch_size), **asdict(share.of_all_tokens), "rules": rules}
        identity.pop("attention", None)  # a rank runs the same operations, however they are described
        return identity

    def identity(self, **what: int) -> dict[str, Any]:
        """As ``identity_of``, for the costs of this model's Graphs."""
        identity = identity_of(self.recipe, **what)
        return identity if self.fused_attention else {**identity, "attention": UNFUSED}


Elsewhere = Callable[[LoadedRecipe], PlanningModel]  # gives the PlanningModel of a recipe in a CaptureProcess


def _capture_to_json(model_of: Elsewhere, recipe: LoadedRecipe, micro_batch_size: int) -> Any:
    return graph_to_json(model_of(recipe).captured_here(micro_batch_size))


def _split_to_json(model_of: Elsewhere, share: Share, recipe: LoadedRecipe, micro_batch_size: int) -> Any:
    split = model_of(recipe).split_here(micro_batch_size, share)
    return {name: asdict(weight_split) for name, weight_split in split.items()}


def _locals_to_json(model_of: Elsewhere, share: Share, recipe: LoadedRecipe, micro_batch_size: int) -> Any:
    return [local_graph_to_json(graph) for graph in model_of(recipe).local_graphs_here(micro_batch_size, share)]


def _locals_from_json(content: Sequence[Any]) -> tuple[LocalGraph, ...]:
    return tuple(map(local_graph_from_json, content))


_last: list[tuple[Any, PlanningModel]] = []  # the model of the last call in a CaptureProcess


def _planning_model(recipe: LoadedRecipe, *, predicted: bool, fresh: bool) -> PlanningModel:
    """The recipe's PlanningModel in a CaptureProcess, where one call may need what another has captured."""
    key = recipe.text, predicted, fresh
    if not _last or _last[0][0] != key:
        _last[:] = [(key, PlanningModel(recipe, predicted=predicted, fresh=fresh))]
    return _last[0][1]


def _splits_from_json(content: dict[str, Any]) -> dict[str, Split]:
    return {name: Split(dim=record["dim"], blocks=tuple(record["blocks"])) for name, record in content.items()}


def default_micro_batch_size(recipe: LoadedRecipe) -> int:
    return recipe.values.plan.micro_batch_size if recipe.values.plan else 1
