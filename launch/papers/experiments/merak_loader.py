"""Merak's split data loader (2022, section 5.3, figure 3): each stage loads only the inputs that it uses."""

from collections.abc import Callable, Iterator, Sequence
from platform import machine
from statistics import mean
from time import process_time

import torch

from auto3d.data import Batches
from auto3d.partition.methods.blocks import blocks
from auto3d.partition.segment import segments
from auto3d.partition.stage import cut
from launch.model.graphs import PlanningModel
from launch.papers.row import Row
from launch.recipe.data import data_settings
from launch.recipe.load import load

NON_SPLIT, SPLIT = "non-split", "split"


def stage_inputs(recipe_name: str, overrides: Sequence[str], stages: int) -> list[tuple[str, ...]]:
    """The inputs that each of ``stages`` equal stages of the recipe's model uses, as the runtime loads them."""
    graph = PlanningModel(load(recipe_name, overrides)).graph(1)
    inputs = []
    for stage in cut(graph, blocks(graph, stages)):
        taken = dict.fromkeys(name for segment in segments(graph, stage, ()) for name in segment.takes)
        inputs.append(tuple(name for name in graph.inputs if name in taken))
    return inputs


def split_loader(
    *,
    tell: Callable[[str], None],
    recipe: str,
    overrides: Sequence[str],
    stages: Sequence[int],
    micro_batch_sizes: Sequence[int],
    micro_batches: int,
    repetitions: int,
) -> Iterator[Row]:
    """Processor time, in ms, that a rank takes to load a micro-batch, and its bytes: all inputs, and its stage's own.

    Each of ``stages`` is a depth of the pipeline. Its ranks load one after the other, since their loaders exchange
    nothing. A time is the mean over ``micro_batches``, in the fastest of ``repetitions``.
    """
    loaded = load(recipe, overrides).values
    settings, seed = data_settings(loaded), loaded.training.seed
    everything = tuple(settings.inputs)
    on = f"cpu ({machine()}), torch {torch.__version__}"
    used = {depth: stage_inputs(recipe, overrides, depth) for depth in stages}
    kinds = dict.fromkeys([everything, *(names for per_stage in used.values() for names in per_stage)])
    loads: dict[tuple[int, tuple[str, ...]], tuple[float, int]] = {}
    for size in micro_batch_sizes:
        tell(f"loading micro-batches of {size}")
        batches = Batches(settings, seed=seed, global_batch=size * micro_batches, micro_batch_size=size)
        batches.micro_batch(0, 0, everything)  # reads the corpus
        for names in kinds:
            loads[size, names] = _load(batches, names, micro_batches, repetitions)
    for depth, names_of in used.items():
        for size in micro_batch_sizes:
            for system, chosen in ((NON_SPLIT, [everything] * depth), (SPLIT, names_of)):
                times = [loads[size, names] for names in chosen]
                setting = (f"{depth} stages", f"micro-batch {size}")
                yield Row(setting=setting, system=system, values=_figures(times, names_of), made_on=on)


def _load(batches: Batches, names: tuple[str, ...], micro_batches: int, repetitions: int) -> tuple[float, int]:
    """(ms per micro-batch, bytes of one micro-batch)."""
    seconds = []
    for repetition in range(repetitions):
        begin = process_time()
        for index in range(micro_batches):
            batches.micro_batch(repetition, index, names)
        seconds.append((process_time() - begin) / micro_batches)
    size = sum(value.nbytes for value in batches.micro_batch(0, 0, names).values())
    return 1000 * min(seconds), size


def _figures(times: Sequence[tuple[float, int]], used: Sequence[tuple[str, ...]]) -> dict[str, float]:
    """Means over all ranks, and over those whose stage uses an input; ``times`` has (ms, bytes) of each rank."""
    loading = [time for time, names in zip(times, used, strict=True) if names]
    return {
        "ms": mean(ms for ms, _ in times),
        "ms_of_loading_ranks": mean(ms for ms, _ in loading),
        "kib": mean(size for _, size in times) / 1024,
        "kib_of_loading_ranks": mean(size for _, size in loading) / 1024,
    }
