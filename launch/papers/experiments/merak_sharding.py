"""Merak's graph sharding (2023, section 4.2): its time with and without the cache, and the stages of AutoPipe."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from platform import machine
from time import perf_counter

from launch.model.graphs import PlanningModel
from launch.model.stages import partition_model
from launch.papers.row import Row
from launch.recipe.load import load

WITHOUT_CACHE, CACHED, CACHED_AND_BUILT = "without cache", "cached", "cached, model built"


def sharding_times(*, tell: Callable[[str], None], recipe: str, models: Mapping[str, Sequence[str]]) -> Iterator[Row]:
    """Minutes until a model's Graph is there as a sequence of subgraphs, and the number of these.

    ``models`` maps each name to the overrides of ``recipe`` that give the model. Without cache the model is built
    without memory for weights, captured and sharded, in this process; cached, both are read from the disk. The third
    system builds the model too, without memory for weights, as a process that trains it does.
    """
    import torch  # loaded here, not while the first model is timed

    from auto3d.capture.skeleton import skeleton
    from launch.model.build import build_function

    on = f"cpu ({machine()}), torch {torch.__version__}"
    PlanningModel(load("tiny"), fresh=True).graph(1)  # the first capture of a process takes longer
    for name, overrides in models.items():
        loaded = load(recipe, overrides)
        for system in (WITHOUT_CACHE, CACHED, CACHED_AND_BUILT):
            tell(f"sharding {name}, {system}")
            began = perf_counter()
            model = PlanningModel(loaded, fresh=system == WITHOUT_CACHE)
            graph = model.graph(1)
            subgraphs = len(model.sharding(graph).subgraphs)
            if system == CACHED_AND_BUILT:
                skeleton(build_function(loaded))
            seconds = perf_counter() - began
            values = {"minutes": seconds / 60, "seconds": seconds, "subgraphs": subgraphs}
            yield Row(setting=(name,), system=system, values=values, made_on=on)


def stage_subgraphs(
    *,
    tell: Callable[[str], None],
    recipe: str,
    overrides: Sequence[str],
    stages: int,
    methods: Sequence[str],
    memory_gib: float | None = None,
) -> Iterator[Row]:
    """The number of subgraphs in each of ``stages`` stages that a partition method makes; computed, not measured.

    ``memory_gib`` replaces the memory of the cluster's devices.
    """
    loaded = load(recipe, overrides)
    for method in methods:
        tell(f"{stages} stages by {method}")
        partitioned = partition_model(
            loaded,
            method=method,
            stages=stages,
            subgraphs=None,
            micro_batch_size=1,
            memory_gib=memory_gib,
            fresh=False,
            equal_slices=True,
        )
        for number, stage in enumerate(partitioned.figures.stages, start=1):
            yield Row(setting=(f"stage {number}",), system=method, values={"subgraphs": len(stage.subgraphs)})
