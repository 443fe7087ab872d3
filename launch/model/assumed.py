"""The figures of a cluster that nobody gave or measured, so that predictions assume them, and what they decide."""

from collections.abc import Sequence
from dataclasses import replace
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from runpy import run_path
from typing import Any

from auto3d.cluster import Accelerator, Cluster
from auto3d.cost.model import CostModel
from auto3d.search.search import Ranked
from launch.model.profile import how_to_measure
from launch.model.search import SHOWN
from launch.recipe.links import AssumedLink
from launch.recipe.load import LoadedRecipe
from launch.recipe.settings import device, predicted_precision, training

FACTORS = (0.5, 2.0)  # bandwidths of assumed links, in relation to what is assumed
TIE = 1e-9  # relative difference of times that counts as none
SIGN = "~"  # mark of a plan whose place the assumed links decide
SIGN_MEANS = f"{SIGN} with half or twice the bandwidth of the assumed links, the plan changes places with a neighbour"
CPU_RULES = (
    "this torch was built without CUDA, so the model was captured in {} by a CPU's rules of autocast, which keep less "
    "in float32 than a GPU's: times and memory on GPUs are higher than predicted (docs/install.md)"
)
PLACES = {"inside": "inside a node", "outside": "between nodes"}


def assumed_links(recipe: LoadedRecipe, measured_in: str) -> list[AssumedLink]:
    """The links that the recipe leaves out, that its cluster uses, and that the profile ``measured_in`` lacks.

    An empty ``measured_in`` stands for no profile.
    """
    kinds = [recipe.values.cluster, *recipe.values.cluster.more]
    used = {
        "inside": [kind.devices_per_node > 1 and not measured_in for kind in kinds],
        "outside": [sum(kind.nodes for kind in kinds) > 1] * len(kinds),
    }
    return [link for link in recipe.assumed_links if used[link.side][link.kind]]


def assumed_lines(recipe: LoadedRecipe, measured_in: str) -> list[str]:
    """What predictions assume, in lines for the user; ``measured_in`` is the profile that they use, or empty."""
    rules = CPU_RULES.format(predicted_precision(recipe.values)) if not measured_in and _has_cpu_rules(recipe) else ""
    return [line for line in (assumed_line(recipe, measured_in), rules) if line]


def assumed_line(recipe: LoadedRecipe, measured_in: str) -> str:
    """The figures that predictions assume, the keys that set them and the commands that measure them, in one line.

    Empty if the recipe or the profile ``measured_in`` has all figures.
    """
    links, devices = assumed_links(recipe, measured_in), _unknown_devices(recipe, measured_in)
    if not links and not devices:
        return ""
    sources: dict[str, list[str]] = {}
    if devices:
        sources["round figures"] = [f"{_tflops():g} TFLOP/s and {_gb_per_s():g} GB/s of memory per device"]
    for link in links:
        source = f"usual for {link.accelerator}" if link.accelerator else "round figures"
        sources.setdefault(source, []).append(_words(link))
    figures = "; ".join(f"{', '.join(dict.fromkeys(words))} ({source})" for source, words in sources.items())
    text = f"assumed: {figures}; to set them: {', '.join([*devices, *(link.key for link in links)])}"
    commands = _commands(recipe, measured_in, between_nodes=any(link.side == "outside" for link in links))
    return f"{text}; to measure them: {', '.join(commands)}" if commands else text


def assumed_records(recipe: LoadedRecipe, measured_in: str) -> list[dict[str, Any]]:
    """The figures of ``assumed_line`` as records: each key with those that stand in for it, in the units of recipes."""
    devices = {"peak_tflops": _tflops(), "memory_gb_per_s": _gb_per_s()}
    links = assumed_links(recipe, measured_in)
    return [
        *({"key": key, **devices} for key in _unknown_devices(recipe, measured_in)),
        *(
            {
                "key": link.key,
                "gbit_per_s": link.gbit_per_s,
                "lanes": link.lanes,
                "latency_us": link.latency_us,
                "usual_for": link.accelerator,
            }
            for link in links
        ),
    ]


def places_assumed(recipe: LoadedRecipe, model: CostModel, ranked: Sequence[Ranked]) -> frozenset[int]:
    """The places, among the ``SHOWN`` best plans, of plans whose order the assumed links decide.

    A plan counts if it is slower than the next plan, or faster than the plan before, once the assumed links have one of
    ``FACTORS`` of their bandwidth. If there is none, these plans keep their order.
    """
    links = [link for link in assumed_links(recipe, model.measured_in) if link.gbit_per_s is not None]
    places: set[int] = set()
    for factor in FACTORS if links else ():
        scaled = model.on(_scaled(recipe, model.cluster, links, factor))
        seconds = [scaled.seconds(ranked_plan.plan) for ranked_plan in ranked[:SHOWN]]
        for place, (this, following) in enumerate(pairwise(seconds)):
            if this > following * (1 + TIE):
                places |= {place, place + 1}
    return frozenset(places)


def _scaled(recipe: LoadedRecipe, machine: Cluster, links: Sequence[AssumedLink], factor: float) -> Cluster:
    """``machine``, the recipe's cluster, with ``factor`` times the bandwidth on ``links``."""
    kinds = enumerate((recipe.values.cluster, *recipe.values.cluster.more))
    numbers = [number for number, kind in kinds for _ in range(kind.nodes)]
    nodes = []
    for number, node in zip(numbers, machine.nodes, strict=True):
        present = {link.side: getattr(node, link.side) for link in links if link.kind == number}
        scaled = {side: replace(link, bandwidth=factor * link.bandwidth) for side, link in present.items()}
        nodes.append(replace(node, **scaled))
    return replace(machine, nodes=tuple(nodes))


def _unknown_devices(recipe: LoadedRecipe, measured_in: str) -> list[str]:
    """The keys of accelerators that are missing, where nothing else says how fast the devices are."""
    if measured_in or recipe.values.model.layers is not None:
        return []
    kinds = enumerate((recipe.values.cluster, *recipe.values.cluster.more))
    return [
        f"cluster.more[{number - 1}].accelerator" if number else "cluster.accelerator"
        for number, kind in kinds
        if kind.accelerator is None
    ]


def _has_cpu_rules(recipe: LoadedRecipe) -> bool:
    """Whether a plan for GPUs in low precision is captured by a torch that was built without CUDA."""
    values = recipe.values
    if device(values) != "cuda" or values.model.layers is not None or not training(values).autocast:
        return False
    spec = find_spec("torch")  # planning commands that find their captures in the cache do not import torch
    assert spec is not None
    assert spec.origin is not None
    return run_path(str(Path(spec.origin).with_name("version.py")))["cuda"] is None


def _words(link: AssumedLink) -> str:
    lanes = "" if link.lanes is None else f" on {link.lanes} lane{'s' * (link.lanes > 1)} per node"
    figures = [] if link.gbit_per_s is None else [f"{link.gbit_per_s:g} Gbit/s{lanes}"]
    figures += [] if link.latency_us is None else [f"{link.latency_us:g} µs"]
    return f"{' and '.join(figures)} {PLACES[link.side]}"


def _commands(recipe: LoadedRecipe, measured_in: str, *, between_nodes: bool) -> list[str]:
    """The commands that measure assumed figures, each with what it measures.

    A profile is of one node. Only the doctor's job on two nodes of SLURM sends messages between them.
    """
    commands = []
    if command := how_to_measure(recipe, measured_in):
        commands.append(f"{command} (a node)")
    if between_nodes and recipe.values.training.compute == "real" and recipe.values.model.layers is None:
        commands.append(f"{recipe.command('doctor', '--devices')} (between nodes, on SLURM)")
    return commands


def _tflops() -> float:
    return Accelerator().peak_flops / 1e12


def _gb_per_s() -> float:
    return Accelerator().memory_bandwidth / 1e9
