"""What an emulated stage does in a pass: it computes for some seconds, then begins a collective, and so on."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from auto3d.cost.tables import without
from auto3d.cost.work import TensorExchange, exchanges_of
from auto3d.derived.local_graph import local_graphs
from auto3d.derived.model import Derived
from auto3d.partition.cost import PartitionCosts, analytic
from auto3d.partition.segment import segments
from auto3d.partition.stage import Stage
from auto3d.partition.turns import HalfPiece, Handover, Turn, turns
from auto3d.plan import StagePlan
from auto3d.schedule.operation import Kind
from auto3d.simulate.costs import Costs


@dataclass(frozen=True, slots=True)
class EmulatedStep:
    """Compute of ``seconds`` after the collectives of the steps ``waits``, and the collective that needs its result."""

    seconds: float
    collective: TensorExchange | None = None
    waits: tuple[int, ...] = ()  # numbers of earlier steps of the same pass
    share: float = 1.0  # fraction of the micro-batch whose values are exchanged


Passes = Mapping[Kind, tuple[EmulatedStep, ...]]
_FORWARD = Kind.FORWARD, Kind.RECOMPUTE
_BACKWARD = Kind.BACKWARD, Kind.BACKWARD_INPUT


def passes_of(
    plan: StagePlan, stage: Stage, derived: Derived | None, costs: Costs, *, parts: int, recompute: bool
) -> Passes:
    """The steps of each kind of operation of ``stage``, of the program that ranks run; ``plan`` is its part of a Plan.

    The seconds of an operation are divided among its steps in the ratios of the analytic cost model. Collectives stand
    where the tensor-parallel program has them: collectives of the backward belong to the input half of a split
    backward. The halves of a sub-pipelined program take turns as in training.
    """
    seconds = {kind: costs.times_of(kind)[stage.index] / parts for kind in Kind}
    passes: dict[Kind, tuple[EmulatedStep, ...]] = {kind: (EmulatedStep(step_s),) for kind, step_s in seconds.items()}
    if derived is None or derived.share.tp == 1:
        return passes
    rank = _RankProgram(derived)
    for kinds, forward in ((_FORWARD, True), (_BACKWARD, False)):
        for kind in kinds:
            if derived.half_of:
                steps = rank.in_turns(derived, plan, stage, forward=forward, recompute=recompute, again=kind)
            else:
                spans = without(plan.operations, plan.kept) if kind is Kind.RECOMPUTE else plan.operations
                steps = rank.in_order(spans, forward=forward)
            passes[kind] = _scaled(steps, seconds[kind])
    return passes


class _RankProgram:
    """The local Graph of a tensor-parallel model with the model's times and collectives of each node."""

    def __init__(self, derived: Derived) -> None:
        (local,) = local_graphs(derived)
        self._graph = local.graph
        self._model: PartitionCosts = analytic(local.graph)
        self._number = {node.name: number for number, node in enumerate(local.graph.nodes)}
        self._exchanges: dict[tuple[int, bool], list[TensorExchange]] = {}
        for exchange in exchanges_of(replace(local, positions=tuple(range(len(local.graph.nodes)))), 1.0):
            self._exchanges.setdefault((exchange.position, exchange.forward), []).append(exchange)

    def in_order(self, spans: Sequence[tuple[int, int]], *, forward: bool) -> list[EmulatedStep]:
        """The steps of a pass through ``spans`` of the local Graph, which waits for each collective at once."""
        numbers = [number for span in spans for number in range(*span)]
        return self._through(numbers if forward else reversed(numbers), forward=forward)

    def in_turns(
        self, derived: Derived, plan: StagePlan, stage: Stage, *, forward: bool, recompute: bool, again: Kind
    ) -> list[EmulatedStep]:
        """The steps of a pass of two halves; ``again`` is the kind of the pass."""
        kept = plan.kept if recompute else [(0, len(self._graph.nodes))]
        divided = turns(derived.program, segments(self._graph, stage, kept), derived.half_of)
        steps: list[EmulatedStep] = []
        exchanging: dict[str, list[int]] = {}  # value, or gradient, that collectives make -> numbers of their steps
        for segment_turns in divided if forward else reversed(divided):
            if again is Kind.RECOMPUTE and segment_turns.segment.kept:
                continue
            for turn in segment_turns.forward if forward else segment_turns.backward:
                takes, gives = _values(turn)
                needed = takes if forward else gives
                waits = tuple(number for name in needed for number in exchanging.pop(name, ()))
                if isinstance(turn, HalfPiece):
                    numbers = sorted(self._number[name] for name in turn.segment.nodes)
                    inside = self._through(numbers if forward else reversed(numbers), forward=forward)
                    first = len(steps)
                    steps += [replace(step, waits=tuple(first + number for number in step.waits)) for step in inside]
                    steps[first] = replace(steps[first], waits=waits)
                    continue
                number = self._number[turn.node]
                share = 1.0 if turn.half is None else 0.5
                exchanges = self._exchanges.get((number, forward), [None])
                steps.append(EmulatedStep(self._seconds(number, forward), exchanges[0], waits, share))
                if exchanges[0] is not None:
                    made = turn.node if forward else turn.takes
                    exchanging.setdefault(made, []).append(len(steps) - 1)
        return steps

    def _through(self, numbers: Iterable[int], *, forward: bool) -> list[EmulatedStep]:
        """The steps of the nodes ``numbers``, in this order; each step waits for the previous step's collective."""
        steps: list[EmulatedStep] = []
        computed = 0.0  # since the last collective

        def end(collective: TensorExchange | None) -> None:
            nonlocal computed
            steps.append(EmulatedStep(computed, collective, (len(steps) - 1,) if steps else ()))
            computed = 0.0

        for number in numbers:
            exchanges = self._exchanges.get((number, forward), [])
            exchanges_first = forward == all(exchange.before for exchange in exchanges)
            if not exchanges_first:
                computed += self._seconds(number, forward)
            for exchange in exchanges if forward else reversed(exchanges):
                end(exchange)
            if exchanges_first:
                computed += self._seconds(number, forward)
        end(None)
        return steps

    def _seconds(self, number: int, forward: bool) -> float:
        return (self._model.forward_s if forward else self._model.backward_s)[number]


def _values(turn: Turn) -> tuple[Sequence[str], Sequence[str]]:
    """The values that ``turn`` takes, and those that it gives."""
    if isinstance(turn, Handover):
        return [turn.takes], [turn.node]
    return turn.segment.takes, turn.segment.gives


def _scaled(steps: Sequence[EmulatedStep], seconds: float) -> tuple[EmulatedStep, ...]:
    """``steps`` that compute for ``seconds`` in total; if they compute nothing, all of it at the end."""
    total = sum(step.seconds for step in steps)
    if not total:
        return (*(replace(step, seconds=0.0) for step in steps), EmulatedStep(seconds))
    return tuple(replace(step, seconds=seconds * step.seconds / total) for step in steps)
