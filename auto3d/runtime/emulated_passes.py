"""What an emulated stage does in a pass: it computes for some seconds, then begins a collective, and so on."""

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

from auto3d.cost.tables import without
from auto3d.cost.work import TensorExchange, exchanges_of
from auto3d.partition.cost import PartitionCosts, analytic
from auto3d.plan import StagePlan
from auto3d.schedule.operation import Kind
from auto3d.simulate.costs import Costs
from auto3d.tensor.local_graph import local_graph
from auto3d.tensor.model import TensorParallelModel

Spans = Sequence[tuple[int, int]]


@dataclass(frozen=True, slots=True)
class EmulatedStep:
    """Compute of ``seconds``, and the collective that needs its result; None after the last compute of a pass."""

    seconds: float
    collective: TensorExchange | None = None


Passes = dict[Kind, tuple[EmulatedStep, ...]]


def passes_of(stage: StagePlan, number: int, tensor: TensorParallelModel | None, costs: Costs, *, parts: int) -> Passes:
    """The steps of each kind of operation of ``stage``, number ``number`` of the plan whose ``costs`` these are.

    The stage is one of the program that ranks run. The seconds of an operation are divided among its steps in the
    ratios of the analytic cost model. Collectives stand where the tensor-parallel program has them: those of the
    backward belong to the input half of a split backward.
    """
    seconds = {kind: costs.times_of(kind)[number] / parts for kind in Kind}
    passes: Passes = {kind: (EmulatedStep(each),) for kind, each in seconds.items()}
    if tensor is None:
        return passes
    local = local_graph(tensor)
    exchanges = exchanges_of(replace(local, positions=tuple(range(len(local.graph.nodes)))), 1.0)
    model = analytic(local.graph)
    again = without(stage.operations, stage.kept)
    for kind, spans in (
        (Kind.FORWARD, stage.operations),
        (Kind.RECOMPUTE, again),
        (Kind.BACKWARD, stage.operations),
        (Kind.BACKWARD_INPUT, stage.operations),
    ):
        forward = kind in (Kind.FORWARD, Kind.RECOMPUTE)
        passes[kind] = _steps(model, exchanges, spans, seconds[kind], forward=forward)
    return passes


def _steps(
    model: PartitionCosts, exchanges: Sequence[TensorExchange], spans: Spans, seconds: float, *, forward: bool
) -> tuple[EmulatedStep, ...]:
    """The steps of a pass through ``spans`` of the local Graph; they compute for ``seconds`` in total."""
    before = [0.0, *accumulate(model.forward_s if forward else model.backward_s)]
    ours = [one for one in exchanges if one.forward == forward]
    places = [one.position for one in ours]
    steps: list[EmulatedStep] = []
    computed = 0.0  # by the model, since the last collective
    for first, last in spans if forward else reversed(spans):
        inside = ours[bisect_left(places, first) : bisect_left(places, last)]
        here = first if forward else last
        for one in inside if forward else reversed(inside):
            steps.append(EmulatedStep(computed + abs(before[one.boundary] - before[here]), one))
            computed, here = 0.0, one.boundary
        computed += abs(before[last if forward else first] - before[here])
    steps.append(EmulatedStep(computed))
    total = sum(step.seconds for step in steps)
    if not total:
        return (*(replace(step, seconds=0.0) for step in steps[:-1]), EmulatedStep(seconds))
    return tuple(replace(step, seconds=seconds * step.seconds / total) for step in steps)
