"""Recipe -> what the cost model needs: the work of the model, captured or measured layer by layer."""

import csv
import os
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from auto3d.capture.graph import Graph
from auto3d.cost.layers import Layer, Measured, times_of_layers, work_of_layers
from auto3d.cost.model import CostModel
from auto3d.cost.work import Work, work_of
from auto3d.search.subject import CapturedSubject, LayeredSubject, Subject
from launch.capture import PlanningModel
from launch.profile import read_profile
from launch.recipe import LoadedRecipe
from launch.settings import cluster, training

PUBLISHED_DATA = "AUTO3D_PUBLISHED_DATA"  # the folder of published measurements, which are not part of the project


def subject_of(recipe: LoadedRecipe) -> Subject:
    """The recipe's model as search and cost model see it."""
    values = recipe.values
    if values.model.layers is None:
        model = PlanningModel(recipe)

        def work(graph: Graph) -> Work:
            bounds = model.sharding(graph).bounds
            return work_of(graph, bounds, precision=values.prediction.precision, fused=values.prediction.fused)

        return CapturedSubject(model.graph, work, lambda graph: model.sharding(graph).bounds)
    layers = [
        Layer(**{name: value for name, value in asdict(sizes).items() if name != "count"})
        for sizes in values.model.layer_sizes
        for _ in range(sizes.count)
    ]
    measured = _measured(recipe, len(layers))
    precision = values.prediction.precision
    return LayeredSubject(
        layers=tuple(layers),
        work=lambda samples: work_of_layers(layers, samples, precision=precision),
        times=lambda samples, accelerator, tp: times_of_layers(
            layers, measured, samples, accelerator, tp, precision=precision
        ),
    )


def cost_model(recipe: LoadedRecipe, subject: Subject) -> CostModel:
    """Of the recipe's cluster and training, with what was measured where there is a profile of it."""
    machine, times = cluster(recipe), subject.times
    if (profile := read_profile(recipe, subject.fingerprint)) is not None:
        machine, times = profile.measured(machine), profile.times_at(subject.work, subject.cuts)
    return CostModel(machine, training(recipe.values), subject.work, times_at=times)


def published(name: str) -> Path:
    """A file of published measurements: of the folder in AUTO3D_PUBLISHED_DATA, else of ../shared/data."""
    return Path(os.environ.get(PUBLISHED_DATA, "../shared/data")) / name


def _measured(recipe: LoadedRecipe, count: int) -> Measured:
    name = recipe.values.model.layers
    file = Path(name) if Path(name).is_file() else published(name)
    if not file.is_file():
        raise recipe.error(
            "model.layers", f"found {name!r}; there is no {file}: {PUBLISHED_DATA} is the folder to look for it in"
        )
    found: dict[tuple[str, int], list[float]] = {}
    with file.open(newline="") as lines:
        rows: Sequence[dict[str, str]] = list(csv.DictReader(lines))
    needed = {"model", "device", "tp", "forward_s_per_sample"}
    if not rows or not needed <= rows[0].keys():
        raise recipe.error("model.layers", f"found {str(file)!r}; it must have the columns {', '.join(sorted(needed))}")
    for row in rows:
        if row["model"] == recipe.values.model.layers_of:
            found.setdefault((row["device"], int(row["tp"])), []).append(float(row["forward_s_per_sample"]))
    if not found:
        names = ", ".join(sorted({row["model"] for row in rows}))
        raise recipe.error(
            "model.layers_of", f"found {recipe.values.model.layers_of!r}; {file} has rows of {names}: it takes one"
        )
    for (device, tp), seconds in found.items():
        if len(seconds) != count:
            problem = f"found sizes of {count} layers; {file} has {len(seconds)} on {device} at tp {tp}"
            raise recipe.error("model.layer_sizes", problem)
    return {key: tuple(seconds) for key, seconds in found.items()}
