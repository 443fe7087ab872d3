"""In which order the two halves of a micro-batch take turns: pieces of computation, and the collectives between them.

After Merak (Lai et al. 2022, section 6.3; TPDS 2023, section 5.3): a collective begins as soon as the value that it
exchanges is complete, and then it is the turn of the other half. In the forward the turns change at collectives of
values, in the backward at collectives of gradients. So the operations are divided at both, and each direction has an
order of its own.
"""

from collections import Counter, deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from torch import fx

from auto3d.capture.graph import Graph, GraphNode
from auto3d.capture.model import CapturedModel
from auto3d.conversions import Collective, conversion_of
from auto3d.partition.segment import Segment


@dataclass(frozen=True, kw_only=True)
class HalfPiece:
    """Operations on one half of a micro-batch, or on all of it, that run without a pause."""

    segment: Segment
    half: int | None


@dataclass(frozen=True, kw_only=True)
class Handover:
    """A conversion of the value ``takes`` whose collective runs while pieces are computed."""

    node: str  # its name, and the name of its result
    takes: str
    half: int | None
    forward: Collective | None
    backward: Collective | None  # None also where the value has no gradient


Turn = HalfPiece | Handover


@dataclass(frozen=True, kw_only=True)
class Turns:
    """The turns of one segment of a stage, in the order of the forward and in the order of the backward.

    A turn that gives no value with a gradient has no place in the backward.
    """

    segment: Segment
    forward: tuple[Turn, ...]
    backward: tuple[Turn, ...]


def turns(captured: CapturedModel, divided: Sequence[Segment], half_of: Mapping[str, int]) -> tuple[Turns, ...]:
    """The turns of each of the segments ``divided`` of a stage.

    ``captured`` is a program with two halves; ``half_of`` has the half of an operation that runs on one half only.
    """
    with_gradient = values_with_gradient(captured.exported.program)
    return tuple(_Division(captured.graph, segment, half_of, with_gradient).turns() for segment in divided)


def values_with_gradient(program: fx.Graph) -> frozenset[str]:
    """Names of the values of ``program`` that autograd follows."""
    return frozenset(node.name for node in program.nodes if getattr(node.meta.get("val"), "requires_grad", False))


_Place = tuple[int | None, int]  # half and level


class _Division:
    """Divides one segment into pieces, one for each half and level: a piece uses other pieces of lower levels only.

    A handover has the level of the piece that makes what it takes.
    """

    def __init__(
        self, graph: Graph, segment: Segment, half_of: Mapping[str, int], with_gradient: frozenset[str]
    ) -> None:
        names = set(segment.nodes)
        self._segment = segment
        self._half_of = half_of
        self._with_gradient = with_gradient
        self._nodes = [node for node in graph.nodes if node.name in names]
        self._maker = {value.name: node for node in self._nodes for value in node.outputs}
        handovers = ((node.name, self._handover(node)) for node in self._nodes)
        self._handovers = {name: handover for name, handover in handovers if handover is not None}
        self._place: dict[str, _Place] = {}

    def turns(self) -> Turns:
        pieces = self._pieces()
        placed: list[tuple[float, Turn]] = [
            *((self._place[name][1] + 0.5, handover) for name, handover in self._handovers.items()),
            *((level, piece) for (_, level), piece in pieces.items()),
        ]
        everything = [turn for _, turn in sorted(placed, key=lambda item: item[0])]
        forward = [
            _Job(turn, takes, gives, turn.forward if isinstance(turn, Handover) else None)
            for turn, takes, gives in map(_values, everything)
        ]
        backward = [  # here a turn needs the gradients of what it gave, and gives the gradients of what it took
            _Job(
                turn,
                self._gradients(gives),
                self._gradients(takes),
                turn.backward if isinstance(turn, Handover) else None,
            )
            for turn, takes, gives in map(_values, reversed(everything))
            if self._gradients(gives)
        ]
        return Turns(segment=self._segment, forward=_in_turns(forward), backward=_in_turns(backward))

    def _handover(self, node: GraphNode) -> Handover | None:
        conversion = conversion_of(node.operator)
        if conversion is None or not (conversion.forward or conversion.backward) or not node.reads:
            return None  # without reads, it converts a weight
        return Handover(
            node=node.name,
            takes=node.reads[0],
            half=self._half_of.get(node.name),
            forward=conversion.forward,
            backward=conversion.backward if node.name in self._with_gradient else None,
        )

    def _gradients(self, names: Iterable[str]) -> tuple[str, ...]:
        return tuple(name for name in names if name in self._with_gradient)

    def _makers(self, node: GraphNode) -> list[GraphNode]:
        return [self._maker[name] for name in node.reads if name in self._maker]

    def _pieces(self) -> dict[_Place, HalfPiece]:
        late: set[str] = set()  # dropout and attention masks: made when they are first used, not all at the beginning
        for node in self._nodes:
            computes = node.name not in self._handovers
            has_gradient = any(value.name in self._with_gradient for value in node.outputs)
            if computes and not has_gradient and all(maker.name in late for maker in self._makers(node)):
                late.add(node.name)
        for node in self._nodes:
            if node.name not in late:
                self._put(node)
        for node in self._nodes:
            if node.name not in self._place:  # only other segments use what it makes
                self._put(node)
        members: dict[_Place, list[GraphNode]] = {}
        for node in self._nodes:
            if node.name not in self._handovers:
                members.setdefault(self._place[node.name], []).append(node)
        used = {*self._segment.gives, *(handover.takes for handover in self._handovers.values())}
        reads = {place: {name for node in nodes for name in node.reads} for place, nodes in members.items()}
        pieces = {}
        for place, nodes in members.items():
            made = dict.fromkeys(value.name for node in nodes for value in node.outputs)
            elsewhere = used.union(*(names for other, names in reads.items() if other != place))
            segment = Segment(
                kept=self._segment.kept,
                nodes=tuple(node.name for node in nodes),
                state=tuple(dict.fromkeys(name for node in nodes for name in node.state)),
                takes=tuple(dict.fromkeys(name for node in nodes for name in node.reads if name not in made)),
                gives=tuple(name for name in made if name in elsewhere),
            )
            pieces[place] = HalfPiece(segment=segment, half=place[0])
        return pieces

    def _put(self, node: GraphNode) -> None:
        """Find the place of ``node`` and of all operations that were only waiting for this first user."""
        half = self._half_of.get(node.name)
        together, pending = [node], [node]
        level = -1 if half is None else 0
        while pending:
            for maker in self._makers(pending.pop()):
                if maker.name in self._place:
                    of_maker, its_level = self._place[maker.name]
                    level = max(level, its_level + (of_maker != half or maker.name in self._handovers))
                elif maker not in together:
                    together.append(maker)
                    pending.append(maker)
        for operation in together:
            self._place[operation.name] = (half, level)


@dataclass(frozen=True, slots=True)
class _Job:
    """A turn in one direction: the values, or the gradients, that it needs complete and that it gives."""

    turn: Turn
    needs: tuple[str, ...]
    gives: tuple[str, ...]
    collective: Collective | None


def _values(turn: Turn) -> tuple[Turn, tuple[str, ...], tuple[str, ...]]:
    if isinstance(turn, Handover):
        return turn, (turn.takes,), (turn.node,)
    return turn, turn.segment.takes, turn.segment.gives


def _in_turns(jobs: Sequence[_Job]) -> tuple[Turn, ...]:
    """An order of ``jobs``, which is the same on every rank: a collective begins as soon as it can, and hands over to
    the other half. Only if no piece can run without it is the oldest collective awaited.
    """
    missing = Counter(name for job in jobs for name in job.gives)  # gradients may come from several jobs
    pending, order, half = list(jobs), [], 0
    exchanging: deque[_Job] = deque()

    def can_run(job: _Job) -> bool:
        return not any(missing[name] for name in job.needs)

    while pending:
        ready = [job for job in pending if can_run(job)]
        job = next((job for job in ready if isinstance(job.turn, Handover)), None)
        job = job or min(ready, key=lambda job: job.turn.half not in (None, half), default=None)
        if job is None:
            job = exchanging.popleft()
            half = half if job.turn.half is None else job.turn.half
        else:
            pending.remove(job)
            order.append(job.turn)
            if job.collective is not None:
                exchanging.append(job)
                half = half if job.turn.half is None else 1 - job.turn.half
                continue
        missing.subtract(job.gives)
    return tuple(order)
