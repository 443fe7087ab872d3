"""A recipe's measured layers: the CSV file of ``model.layers`` as a model to plan."""

import csv
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, replace
from functools import cache
from pathlib import Path
from statistics import mean

from auto3d.cluster import Accelerator, Cluster
from auto3d.cost.layers import (
    Layer,
    MeasuredLayers,
    MeasuredPasses,
    times_of_layers,
    times_of_passes,
    work_of_layers,
)
from auto3d.cost.work import Work
from auto3d.search.planned_model import PlannedLayers
from auto3d.words import counted
from launch.recipe.load import LoadedRecipe
from launch.recipe.schema import FLOAT8
from launch.recipe.settings import predicted_precision
from launch.recipe.shipped import RECIPES

PUBLISHED = RECIPES / "published" / "data"  # published measurements, each with its source
ONE_SAMPLE = ("model", "device", "tp", "forward_s_per_sample")
PASSES = ("micro_batch_size", "tp", "layer", "forward_s", "backward_s", "update_s")
DEVICE = "device"  # a column that passes of several kinds of devices have too


def measured_model(recipe: LoadedRecipe) -> PlannedLayers:
    """The layers of ``model.layer_sizes`` with the times of ``model.layers``.

    Raises RecipeError where the file is missing, or has other columns or another number of layers, and for float8.
    """
    if recipe.values.prediction.precision == FLOAT8:
        problem = f"found {FLOAT8!r}; the layers of model.layers are known in the precision of their measurement alone"
        raise recipe.error("prediction.precision", problem)
    layers = _layers(recipe)
    rows = _rows(recipe)
    precision = predicted_precision(recipe.values)

    def work(samples: int, tp: int) -> Work:
        return work_of_layers(layers, samples, tp, precision=precision)

    if PASSES[-1] in rows[0]:
        passes = _passes(recipe, len(layers))
        return PlannedLayers(
            layers=layers,
            layer_work=lambda samples, tp: replace(work(samples, tp), exchanges=()),  # the passes include them
            times=lambda samples, accelerator, share: times_of_passes(layers, passes, samples, accelerator, share.tp),
        )
    measured = _one_sample(recipe, rows, len(layers))
    return PlannedLayers(
        layers=layers,
        layer_work=work,
        times=lambda samples, accelerator, share: times_of_layers(
            layers, measured, samples, accelerator, share.tp, precision=precision
        ),
    )


def with_measured_update(machine: Cluster, recipe: LoadedRecipe) -> Cluster:
    """``machine`` with each device's measured time of the optimizer's update of one parameter, where ``model.layers``
    has it."""
    if recipe.values.model.layers is None or PASSES[-1] not in _rows(recipe)[0]:
        return machine
    parameters = sum(layer.parameters for layer in _layers(recipe))
    seconds: dict[str, list[float]] = {}  # device -> time for one parameter, in each measurement of all layers
    for device, rows in _by_device(recipe).items():
        totals: dict[tuple[str, str], float] = {}
        for row in rows:
            key = row["micro_batch_size"], row["tp"]
            totals[key] = totals.get(key, 0.0) + float(row["update_s"])
        seconds[device] = [total * int(tp) / parameters for (_, tp), total in totals.items()]

    def measured(kind: Accelerator) -> Accelerator:
        return replace(kind, update_s=mean(seconds[kind.name])) if kind.name in seconds else kind

    nodes = (replace(node, accelerator=measured(node.accelerator)) for node in machine.nodes)
    return replace(machine, nodes=tuple(nodes))


def published(name: str) -> Path:
    """A file of the published measurements that the project holds."""
    return PUBLISHED / name


def _layers(recipe: LoadedRecipe) -> tuple[Layer, ...]:
    return tuple(
        Layer(**{name: value for name, value in asdict(sizes).items() if name != "count"})
        for sizes in recipe.values.model.layer_sizes
        for _ in range(sizes.count)
    )


def _rows(recipe: LoadedRecipe) -> Sequence[Mapping[str, str]]:
    """The rows of ``model.layers``."""
    name = recipe.values.model.layers
    assert name is not None
    file = Path(name) if Path(name).is_file() else published(name)
    if not file.is_file():
        raise recipe.error(
            "model.layers", f"found {name!r}; there is no such file, also not among the published ones of {PUBLISHED}"
        )
    rows = _read(file)
    if not rows or not any(set(columns) <= rows[0].keys() for columns in (ONE_SAMPLE, PASSES)):
        wanted = " or ".join(", ".join(columns) for columns in (ONE_SAMPLE, PASSES))
        raise recipe.error("model.layers", f"found {str(file)!r}; it must have the columns {wanted}")
    return rows


@cache
def _read(file: Path) -> tuple[Mapping[str, str], ...]:
    with file.open(newline="") as lines:
        return tuple(csv.DictReader(lines))


def _one_sample(recipe: LoadedRecipe, rows: Sequence[Mapping[str, str]], count: int) -> MeasuredLayers:
    times: dict[tuple[str, int], list[float]] = {}
    for row in rows:
        if row["model"] == recipe.values.model.layers_of:
            times.setdefault((row["device"], int(row["tp"])), []).append(float(row["forward_s_per_sample"]))
    if not times:
        names = ", ".join(sorted({row["model"] for row in rows}))
        raise recipe.error(
            "model.layers_of",
            f"found {recipe.values.model.layers_of!r}; {recipe.values.model.layers} has rows of {names}: it takes one",
        )
    for (device, tp), seconds in times.items():
        _check_count(recipe, len(seconds), count, f"on {device} at tp {tp}")
    takers = _takers(recipe, [device for device, _ in times])
    return {(name, tp): tuple(seconds) for (device, tp), seconds in times.items() for name in takers[device]}


def _by_device(recipe: LoadedRecipe) -> dict[str, list[Mapping[str, str]]]:
    """The measured passes by kind of device: the column ``device``, or else the only kind that the cluster has.

    Raises RecipeError where the file does not say which of several kinds of devices it is of.
    """
    rows, kinds = _rows(recipe), _kinds(recipe)
    if DEVICE not in rows[0]:
        if len(kinds) > 1:
            problem = f"found {recipe.values.model.layers!r}, which has no column {DEVICE!r}"
            raise recipe.error("model.layers", f"{problem}; it must say of which each row is: {', '.join(kinds)}")
        return {kinds[0]: list(rows)}
    by_device: dict[str, list[Mapping[str, str]]] = {}
    for row in rows:
        by_device.setdefault(row[DEVICE], []).append(row)
    takers = _takers(recipe, by_device)
    return {name: of_device for device, of_device in by_device.items() for name in takers[device]}


def _kinds(recipe: LoadedRecipe) -> list[str]:
    """The accelerators of the cluster, each once."""
    cluster = recipe.values.cluster
    return list(dict.fromkeys(nodes.accelerator or Accelerator().name for nodes in (cluster, *cluster.more)))


def _takers(recipe: LoadedRecipe, devices: Iterable[str]) -> dict[str, list[str]]:
    """Device of the file -> the accelerators of the cluster that take its rows, or its own name if none does.

    Cases do not count. An accelerator under a system, as V100-16GB-amp, takes the rows of its device where it has none.
    """
    takers: dict[str, list[str]] = {device: [] for device in devices}
    for kind in _kinds(recipe):
        known = [device for device in takers if f"{kind}-".casefold().startswith(f"{device}-".casefold())]
        if known:
            takers[max(known, key=len)].append(kind)
    return {device: kinds or [device] for device, kinds in takers.items()}


def _passes(recipe: LoadedRecipe, count: int) -> Mapping[tuple[str, int], MeasuredPasses]:
    """The measured passes by kind of device and degree."""
    passes = {}
    for device, rows in _by_device(recipe).items():
        by_degree: dict[int, dict[int, list[Mapping[str, str]]]] = {}
        for row in rows:
            by_degree.setdefault(int(row["tp"]), {}).setdefault(int(row["micro_batch_size"]), []).append(row)
        for tp, by_size in by_degree.items():
            sizes = sorted(by_size)
            ordered = [sorted(by_size[size], key=lambda row: int(row["layer"])) for size in sizes]
            for size, layers in zip(sizes, ordered, strict=True):
                _check_count(recipe, len(layers), count, f"on {device} at tp {tp} and micro_batch_size {size}")
            passes[device, tp] = MeasuredPasses(
                samples=tuple(sizes),
                forward=tuple(tuple(float(row["forward_s"]) for row in layers) for layers in ordered),
                backward=tuple(tuple(float(row["backward_s"]) for row in layers) for layers in ordered),
            )
    return passes


def _check_count(recipe: LoadedRecipe, present: int, count: int, where: str) -> None:
    if present != count:
        problem = f"found sizes of {counted(count, 'layer')}; {recipe.values.model.layers} has {present} {where}"
        raise recipe.error("model.layer_sizes", problem)
