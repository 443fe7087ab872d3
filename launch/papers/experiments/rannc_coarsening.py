"""RaNNC with and without coarsening (section IV-C): its plans, and how its search grows with the model."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from math import inf
from platform import machine, python_version
from time import process_time
from typing import Any

import numpy as np

from auto3d.capture.interpolate import interpolate
from auto3d.errors import InputError
from auto3d.partition import Partition, PartitionRequest
from auto3d.partition.cost import PartitionCosts
from auto3d.partition.methods.rannc import LEAST_CAPTURED, find_units, form_blocks
from auto3d.partition.methods.rannc.atomic import Subcomponent, atomic_subcomponents, stage_of_operations
from auto3d.partition.methods.rannc.operation_profile import OperationProfile, OperationProfiles, value_numbers
from auto3d.partition.methods.rannc.stages import StageForm, StageSearch
from auto3d.partition.request import BLOCKS
from auto3d.plan import stages_of_operations
from auto3d.search.algorithms.rannc import partition_request
from auto3d.search.make import PlanMaker
from auto3d.search.partitioned import plan_of
from launch.model.candidates import task
from launch.model.costs import cost_model, planning_subject
from launch.papers.item import FOLDER
from launch.papers.row import Row
from launch.recipe.load import load_groups

COARSENED, SUMMED, FINE = "32 blocks", "no coarsening, sums of components", "no coarsening, exact times"
REPORTS = ("samples_per_s", "search_s", "billion_steps")


@dataclass(frozen=True, kw_only=True)
class Found:
    """What one search found; no plan where nothing fits."""

    samples_per_s: float
    search_s: float  # processor time of the stage level
    blocks: int
    plan: str
    problem: str = ""


class _SummedProfiles(OperationProfiles):
    """Profiles of components that were run one by one: stages take the sums of their components.

    Each component waits for its launch, and holds its inputs and results beside what autograd keeps.
    """

    def at(self, size: int) -> OperationProfile:
        exact, number = super().at(size), value_numbers(self.graph)
        held = [
            sum(exact.value_bytes[number[name]] for name in node.reads)
            + sum(exact.value_bytes[number[value.name]] for value in node.outputs)
            for node in self.graph.nodes
        ]
        none = np.zeros(len(self.graph.nodes))
        return replace(
            exact,
            forward_s=np.maximum(exact.forward_s, exact.forward_launch_s),
            backward_s=np.maximum(exact.backward_s, exact.backward_launch_s),
            forward_launch_s=none,
            backward_launch_s=none,
            internal_bytes=exact.internal_bytes + np.array(held),
        )


def rannc_coarsening(
    *, tell: Callable[[str], None], base: dict[str, Any], layers: Sequence[int], uncoarsened: int, report: str
) -> Iterator[Row]:
    """Rows of BERT models with so many ``layers``; those with at most ``uncoarsened`` are also searched uncoarsened.

    ``base`` has the groups of a recipe. ``report`` is one of REPORTS, the quantity of the rows: predicted samples per
    second of the plan; processor time of the search (measured here); or the steps of algorithm 1 (counted).
    """
    if report not in REPORTS:
        raise InputError(f"report: found {report!r}; it takes {', '.join(REPORTS)}")
    for count in layers:
        for system in (COARSENED, FINE, SUMMED):
            tell(f"rannc-coarsening: {count} layers, {system}")
            setting = (f"{count} layers",)
            if report == "billion_steps":
                if system != SUMMED:
                    steps = _case(_key(base), count).steps(coarsened=system == COARSENED) / 1e9
                    yield Row(setting=setting, system=system, values={report: steps})
                continue
            if system != COARSENED and count > uncoarsened:
                yield Row(
                    setting=setting, system=system, problem=f"fine blocks are searched up to {uncoarsened} layers"
                )
                continue
            searched = _found(_key(base), count, system)
            values = {} if searched.problem else {report: getattr(searched, report)}
            where = f"{machine()}, Python {python_version()}" if report == "search_s" else ""
            yield Row(
                setting=setting,
                system=system,
                values=values,
                plan=searched.plan,
                problem=searched.problem,
                made_on=where,
            )


class _Case:
    """A BERT model on the paper's cluster, ready to be searched."""

    def __init__(self, base: dict[str, Any], layers: int) -> None:
        recipe = load_groups(
            "rannc-coarsening", FOLDER / "rannc-coarsening.yaml", base, [f"model.config.num_hidden_layers={layers}"]
        )
        planned = planning_subject(recipe)
        self.maker = PlanMaker(planned, cost_model(recipe, planned), task(recipe))
        self.cluster = self.maker.model.cluster
        self.batch = self.maker.workload.global_batch

    @cache  # noqa: B019 - cases live as long as the process
    def graph_at(self, size: int) -> Any:
        request = self.request(inf)
        return interpolate(request.graph_at(LEAST_CAPTURED), request.graph_at(2 * LEAST_CAPTURED), size)

    def request(self, memory_bytes: float) -> PartitionRequest:
        return partition_request(self.maker, memory_bytes)

    def costs_at(self, size: int) -> PartitionCosts:
        return self.request(self.cluster.memory_bytes or inf).costs_of(self.graph_at(size))

    def blocks(self, *, coarsened: bool) -> Sequence[Sequence[Subcomponent]]:
        profiles = OperationProfiles(self.graph_at, self.costs_at, smallest=1, largest=self.batch)
        units = find_units(
            profiles.graph,
            atomic_subcomponents(profiles.graph),
            times=profiles.at(max(1, self.batch // self.cluster.devices)),
            sizes=profiles.at(1),
            state_factor=profiles.costs.state_factor,
            memory_bytes=profiles.costs.memory_bytes,
        )
        return form_blocks(units, BLOCKS) if coarsened else units.members

    def search(self, system: str) -> tuple[StageForm | None, Sequence[Sequence[Subcomponent]], float]:
        """The stages, the blocks that they consist of, and the processor time of the stage level."""
        kind = _SummedProfiles if system == SUMMED else OperationProfiles
        profiles = kind(self.graph_at, self.costs_at, smallest=1, largest=self.batch)
        blocks = self.blocks(coarsened=system == COARSENED)
        start = process_time()
        search = StageSearch(
            blocks,
            profiles,
            nodes=len(self.cluster.nodes),
            devices_per_node=self.cluster.devices_per_node,
            global_batch=self.batch,
            equal_slices=True,
        )
        return search.search(), blocks, process_time() - start

    def steps(self, *, coarsened: bool) -> int:
        """Steps of algorithm 1 for all numbers of stages and micro-batches of a pipeline on one node."""
        blocks, devices = len(self.blocks(coarsened=coarsened)), self.cluster.devices_per_node
        trials = (self.batch // len(self.cluster.nodes)).bit_length()
        return trials * sum(
            steps_of_algorithm_1(blocks, stages, devices) for stages in range(1, min(devices, blocks) + 1)
        )


def steps_of_algorithm_1(blocks: int, stages: int, devices: int) -> int:
    """Innermost steps of algorithm 1: S · T(B - S + 1) · T(D - S + 1), where T(n) = n (n + 1) / 2, without d_min."""

    def triangle(number: int) -> int:
        return number * (number + 1) // 2

    return stages * triangle(blocks - stages + 1) * triangle(devices - stages + 1)


_CASES: dict[tuple[str, int], _Case] = {}
_FOUND: dict[tuple[str, int, str], Found] = {}
_BASES: dict[str, dict[str, Any]] = {}


def _key(base: dict[str, Any]) -> str:
    key = repr(base)
    _BASES[key] = base
    return key


def _case(key: str, layers: int) -> _Case:
    if (key, layers) not in _CASES:
        _CASES[key, layers] = _Case(_BASES[key], layers)
    return _CASES[key, layers]


def _found(key: str, layers: int, system: str) -> Found:
    place = key, layers, system
    if place not in _FOUND:
        _FOUND[place] = _searched(_case(key, layers), system)
    return _FOUND[place]


def _searched(case: _Case, system: str) -> Found:
    form, blocks, seconds = case.search(system)
    if form is None:
        return Found(samples_per_s=0.0, search_s=seconds, blocks=len(blocks), plan="", problem="nothing fits")
    graph, several = case.graph_at(1), len(form.runs) > 1
    parts = [[sub for block in blocks[run.first : run.last + 1] for sub in block] for run in form.runs]
    partition = Partition(
        stages=stages_of_operations(stage_of_operations(graph, parts)),
        replicas=tuple(run.replicas * form.pipelines for run in form.runs),
        pipelines=form.pipelines,
        micro_batches=form.micro_batches,
        schedule="gpipe" if several else "1f1b",
        schedule_options={"recompute": "full" if several else "none"},
    )
    request = replace(case.request(inf), graph_at=partial(case.graph_at))
    plan = plan_of(partition, request, seed=case.maker.workload.seed)
    return Found(
        samples_per_s=plan.global_batch / case.maker.model.seconds(plan),
        search_s=seconds,
        blocks=len(blocks),
        plan=f"dp={plan.dp} pp={plan.pp} micro-batch={plan.micro_batch_size} of {len(blocks)} blocks",
    )
