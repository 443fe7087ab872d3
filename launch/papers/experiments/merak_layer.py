"""Time of one transformer layer by micro-batch size (Merak 2022, figure 6): predicted, measured here, and published."""

import csv
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from platform import machine
from time import process_time
from typing import Any

import numpy as np
import torch
from scipy.optimize import least_squares
from torch import nn

from auto3d.capture.graph import Graph
from auto3d.cluster import Accelerator
from auto3d.cost.times import times_of
from auto3d.cost.work import Work
from auto3d.data import Batches
from auto3d.runtime.profile.distinct_subgraphs import distinct_subgraphs
from auto3d.runtime.profile.subgraph_timing import SubgraphRun
from auto3d.runtime.weights.materialize import materialize
from auto3d.search.planned_model import PlannedGraphs
from launch.model.build import captured_model
from launch.model.costs import planning_subject
from launch.model.measured_layers import published
from launch.papers.row import Row
from launch.recipe.data import data_settings
from launch.recipe.load import LoadedRecipe, load_groups
from launch.recipe.settings import cluster

Groups = Mapping[str, Any]  # the groups of a recipe
Layers = Mapping[str, Groups]  # name -> the groups that replace the base's
Tell = Callable[[str], None]
Seconds = tuple[float, float]  # forward and backward

FITTED_FROM = 8  # samples; with fewer, a published layer is bound by the launches of its host
REPETITIONS = 3


def predicted_layers(
    *, tell: Tell, base: Groups, layers: Layers, module: str, micro_batch_sizes: Sequence[int]
) -> Iterator[Row]:
    """The predicted times of the layer ``module`` of each of ``layers`` on the slowest device of its cluster."""
    for name, groups in layers.items():
        tell(f"predicting a layer of {name}")
        recipe = _recipe(name, base, groups)
        device, work_at = _accelerator(recipe), _layer_work(recipe, module)
        yield from _rows(name, {size: _predicted(*work_at(size), device) for size in micro_batch_sizes}, "")


def measured_layers(
    *, tell: Tell, base: Groups, layers: Layers, module: str, micro_batch_sizes: Sequence[int]
) -> Iterator[Row]:
    """Processor time of the layer ``module`` of each of ``layers``, run as a stage runs it, on one thread of this CPU.

    Each time is the fastest of ``REPETITIONS``, after a run that is not measured.
    """
    on = f"cpu ({machine()}), 1 thread, torch {torch.__version__}"
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        for name, groups in layers.items():
            tell(f"measuring a layer of {name}")
            recipe = _recipe(name, base, groups)
            yield from _rows(name, {size: _measured(recipe, module, size) for size in micro_batch_sizes}, on)
    finally:
        torch.set_num_threads(threads)


def published_layers(*, tell: Tell, base: Groups, layers: Layers, module: str, file: str, device: str) -> Iterator[Row]:
    """Times that others measured on ``device``, in a published ``file``, beside predictions for the same layers."""
    for name, groups in layers.items():
        tell(f"predicting a layer of {name}")
        recipe = _recipe(name, base, groups)
        accelerator, work_at = _accelerator(recipe), _layer_work(recipe, module)
        for size, seconds in _published(file, device, name).items():
            predicted = _predicted(*work_at(size), accelerator)
            for system, (forward, backward) in (("published", seconds), ("predicted", predicted)):
                values = {"ms": 1e3 * (forward + backward), "forward_ms": 1e3 * forward, "backward_ms": 1e3 * backward}
                yield Row(setting=(name, f"micro-batch {size}"), system=system, values=values)


def fitted_accelerator(
    *, tell: Tell, base: Groups, layers: Layers, module: str, file: str, device: str
) -> Iterator[Row]:
    """matrix_efficiency and half_gflops with which the predictions of ``published_layers`` are closest to the times.

    Least squares of the logarithm of predicted over published, forward and backward each, from ``FITTED_FROM`` samples.
    The other figures are taken from the recipe's accelerator.
    """
    known: list[tuple[Work, int, int, Seconds]] = []
    for name, groups in layers.items():
        tell(f"fitting to a layer of {name}")
        recipe = _recipe(name, base, groups)
        work_at = _layer_work(recipe, module)
        known += [(*work_at(size), seconds) for size, seconds in _published(file, device, name).items()]
    start = _accelerator(recipe)

    def errors(logarithms: np.ndarray) -> np.ndarray:
        efficiency, half_flops = np.exp(logarithms)
        tried = replace(start, matrix_efficiency=efficiency, half_flops=half_flops)
        times = [(_predicted(work, first, last, tried), seconds) for work, first, last, seconds in known]
        return np.log([mine / theirs for pair in times for mine, theirs in zip(*pair, strict=True)])

    fit = least_squares(errors, np.log([start.matrix_efficiency, start.half_flops]))
    efficiency, half_flops = np.exp(fit.x)
    in_file = {"matrix_efficiency": start.matrix_efficiency, "half_gflops": start.half_flops / 1e9}
    fitted = {"matrix_efficiency": efficiency, "half_gflops": half_flops / 1e9}
    for system, values in (("fitted", fitted), ("in the file", in_file)):
        for parameter, value in values.items():
            yield Row(setting=(parameter,), system=system, values={"figure": float(value)})
    yield Row(setting=("mean error",), system="fitted", values={"figure": float(np.mean(np.abs(np.expm1(fit.fun))))})


def _recipe(name: str, base: Groups, groups: Groups) -> LoadedRecipe:
    return load_groups(f"layer-{name}".replace(" ", "-"), Path(name), {**base, **groups})


def _accelerator(recipe: LoadedRecipe) -> Accelerator:
    machines = cluster(recipe)
    return machines.slowest(range(machines.devices))


def _layer_work(recipe: LoadedRecipe, module: str) -> Callable[[int], tuple[Work, int, int]]:
    """A function of the number of samples: the work of the model, and the range of ``module`` in it."""
    subject = planning_subject(recipe, only_predicted=True)
    assert isinstance(subject, PlannedGraphs), "a captured model"
    return lambda samples: (subject.work(samples), *_range(subject.graph(samples), module))


def _range(graph: Graph, module: str) -> tuple[int, int]:
    """The positions of the operations of ``module``: from, to before."""
    inside = [number for number, node in enumerate(graph.nodes) if f"{node.module}.".startswith(f"{module}.")]
    first, last = inside[0], inside[-1] + 1
    assert last - first == len(inside), "a layer's operations follow each other"
    return first, last


def _predicted(work: Work, first: int, last: int, device: Accelerator) -> Seconds:
    forward, forward_launch, backward, backward_launch, _ = times_of(work, device).range(first, last)
    return float(max(forward, forward_launch)), float(max(backward, backward_launch))


def _measured(recipe: LoadedRecipe, module: str, size: int) -> Seconds:
    captured = captured_model(recipe, size)
    graph = captured.graph
    model = distinct_subgraphs(captured, [0, *_range(graph, module), len(graph.nodes)])
    stage = model.distinct[model.kinds[1]]
    names = sorted(set(stage.state) - set(captured.exported.constants))
    state = materialize(captured.exported.build, names, seed=recipe.values.training.seed)
    for name in graph.trained.intersection(names):
        state[name] = nn.Parameter(state[name])
        state[name].grad = torch.zeros_like(state[name])
    batches = Batches(
        data_settings(recipe.values), seed=recipe.values.training.seed, global_batch=size, micro_batch_size=size
    )
    run = SubgraphRun(stage, model, state, batches, torch.device("cpu"), split=False)
    times = [(_processor_time(run.forward), _processor_time(run.backward)) for _ in range(1 + REPETITIONS)]
    forward, backward = (min(seconds) for seconds in zip(*times[1:], strict=True))
    return forward, backward


def _processor_time(call: Callable[[], None]) -> float:
    began = process_time()
    call()
    return process_time() - began


def _published(file: str, device: str, name: str) -> dict[int, Seconds]:
    """Samples -> published seconds of the layer ``name``, from ``FITTED_FROM`` samples."""
    with published(file).open(newline="") as lines:
        rows = [row for row in csv.DictReader(lines) if row["device"] == device and row["model"] == name]
    by_size = {
        int(row["micro_batch"]): (float(row["forward_ms"]) / 1e3, float(row["backward_ms"]) / 1e3) for row in rows
    }
    return {size: seconds for size, seconds in by_size.items() if size >= FITTED_FROM}


def _rows(name: str, times: Mapping[int, Seconds], on: str) -> Iterator[Row]:
    """Rows of one layer, with its time per sample, also relative to the largest micro-batch's."""
    per_sample = {size: sum(seconds) / size for size, seconds in times.items()}
    least = per_sample[max(per_sample)]
    for size, sample_s in per_sample.items():
        values = {
            "ms_per_sample": 1e3 * sample_s,
            "against_largest": sample_s / least,
            "backward_over_forward": times[size][1] / times[size][0],
        }
        yield Row(setting=(f"micro-batch {size}",), system=name, values=values, made_on=on)
