"""The stages of a cut Graph: their operations, state, inputs, and the values that they exchange."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, groupby, pairwise

from auto3d.capture.graph import Graph, Value
from auto3d.errors import InputError
from auto3d.plan import PlanError, StagePlan, stages_of_operations


@dataclass(frozen=True, kw_only=True)
class Transfer:
    """A value that goes from stage ``source`` to stage ``target``; its gradient, if it has one, goes back.

    It may be an input of the model, which stage 0 has read for both; that has no gradient.
    """

    value: Value
    source: int
    target: int


@dataclass(frozen=True, kw_only=True)
class Stage:
    """One stage of a cut Graph.

    ``nodes`` holds the stage's operations and copies of operations of earlier stages that depend on graph inputs alone
    (masks, positions): repeating those is cheaper than sending their results.
    """

    index: int
    nodes: tuple[str, ...]
    inputs: tuple[str, ...]  # graph inputs that the stage loads
    state: tuple[str, ...]  # parameters, buffers and constants
    received: tuple[Transfer, ...]
    sent: tuple[Transfer, ...]
    flops: int  # forward FLOPs of one micro-batch
    has_loss: bool


class PartitionError(InputError):
    """The model cannot be cut into this number of stages."""


def possible_cuts(graph: Graph) -> list[int]:
    """Positions where a stage may begin, and the end of the model: all operations on a written buffer stay together."""
    users: dict[str, list[int]] = {}
    for position, node in enumerate(graph.nodes):
        for name in graph.written_buffers & set(node.state):
            users.setdefault(name, []).append(position)
    inside = {position for positions in users.values() for position in range(positions[0] + 1, positions[-1] + 1)}
    return [position for position in range(len(graph.nodes) + 1) if position not in inside]


def crossing_bytes(graph: Graph) -> list[int]:
    """Bytes that each cut would send onward; entry i is for the cut before operation i."""
    last_use = {name: index for index, node in enumerate(graph.nodes) for name in node.reads}
    change = [0] * (len(graph.nodes) + 1)
    for index, node in enumerate(graph.nodes):
        for value in node.outputs:
            if not node.from_inputs and last_use.get(value.name, index) > index:
                change[index + 1] += value.bytes
                change[last_use[value.name] + 1] -= value.bytes
    return list(accumulate(change))


def check_enough(before: Sequence[float], stages: int) -> None:
    """Raise PartitionError unless each of ``stages`` can get some weight; ``before`` has the weight before each cut."""
    costly = sum(after > here for here, after in pairwise(before))
    if stages > costly:
        raise PartitionError(
            f"{stages} stages, but only {costly} operations of the model cost anything; each stage needs one"
        )


def same_stages(stages: Sequence[StagePlan], graph: Graph, other: Graph) -> tuple[StagePlan, ...]:
    """The stages of ``other``, the same model at another micro-batch size, that match the ``stages`` of ``graph``.

    They keep the same operations and have the same replicas. Operations that depend on inputs alone may differ; each
    belongs to the first stage that uses it. Raises PartitionError where any other operation differs.
    """
    if not graph.same_operations(other):
        raise PartitionError(
            f"the model's operations at micro-batch size {graph.micro_batch_size} are not those at "
            f"{other.micro_batch_size}; stages of one do not cut the other"
        )
    stage_of = {
        graph.nodes[position].name: index
        for index, stage in enumerate(stages)
        for span in stage.operations
        for position in range(*span)
    }
    numbers: list[int] = []
    first_user: dict[str, int] = {}
    for node in reversed(other.nodes):
        if node.from_inputs:
            stage = min((first_user.get(value.name, len(stages) - 1) for value in node.outputs), default=0)
        else:
            stage = stage_of[node.name]
        numbers.append(stage)
        for name in node.reads:
            first_user[name] = min(stage, first_user.get(name, stage))
    same = stages_of_operations(numbers[::-1])
    kept = {graph.nodes[position].name for stage in stages for span in stage.kept for position in range(*span)}
    return tuple(
        replace(there, replicas=here.replicas, kept=_spans_of(other, there.operations, kept))
        for here, there in zip(stages, same, strict=True)
    )


def _spans_of(graph: Graph, spans: Sequence[tuple[int, int]], names: set[str]) -> tuple[tuple[int, int], ...]:
    """Ranges of positions inside ``spans`` whose operations are named in ``names``."""
    ranges = []
    for span in spans:
        for inside, run in groupby(range(*span), key=lambda position: graph.nodes[position].name in names):
            positions = list(run)
            if inside:
                ranges.append((positions[0], positions[-1] + 1))
    return tuple(ranges)


def input_users(graph: Graph) -> dict[str, frozenset[int]]:
    """Input of the model -> positions of the operations whose stages need it.

    They read it, or what depends on inputs alone and is made of it: each stage makes that again.
    """
    users: dict[str, set[int]] = {name: set() for name in graph.inputs}
    made_of: dict[str, set[str]] = {name: {name} for name in graph.inputs}  # input, or value made of inputs alone
    for position, node in enumerate(graph.nodes):
        inputs = set[str]().union(*(made_of.get(name, ()) for name in node.reads))
        for name in inputs:
            users[name].add(position)
        if node.from_inputs:
            made_of.update((value.name, inputs) for value in node.outputs)
    return {name: frozenset(positions) for name, positions in users.items()}


def cut(graph: Graph, stages: Sequence[StagePlan], *, read_once: bool = False) -> tuple[Stage, ...]:
    """The stages of ``graph`` that ``stages`` describes.

    Each stage loads the inputs that it uses; if they are ``read_once``, stage 0 loads all and sends them. Raises
    PlanError unless they cover exactly its operations, values only go from earlier to later stages, and all
    operations on a written buffer are on one stage.
    """
    needed = [{position for span in stage.operations for position in range(*span)} for stage in stages]
    stage_of = {position: index for index, positions in enumerate(needed) for position in positions}
    if stage_of.keys() != set(range(len(graph.nodes))):
        raise PlanError(f"stages: they end at operation {max(stage_of)}; the model has {len(graph.nodes)} operations")
    received: list[dict[str, int]] = [{} for _ in stages]  # value -> source stage
    for index in range(len(stages)):
        pending = sorted(needed[index])
        while pending:
            for name in graph.nodes[pending.pop()].reads:
                maker = graph.producer.get(name)
                if maker is None or maker in needed[index]:
                    continue
                if graph.nodes[maker].from_inputs:
                    needed[index].add(maker)
                    pending.append(maker)
                else:
                    received[index][name] = stage_of[maker]
                    if stage_of[maker] > index:
                        later = stage_of[maker]
                        raise PlanError(f"stages: stage {index} uses {name}, which the later stage {later} makes")

    for name, needed_at in input_users(graph).items() if read_once else ():
        for index, positions in enumerate(needed):
            if index > 0 and not needed_at.isdisjoint(positions):
                received[index][name] = 0
    inputs = {name: replace(value, differentiable=False) for name, value in graph.inputs.items()}
    place = {name: number - len(inputs) for number, name in enumerate(inputs)} | graph.producer
    transfers = [
        Transfer(value=inputs[name] if name in inputs else graph.value(name), source=source, target=target)
        for target, sources in enumerate(received)
        for name, source in sorted(sources.items(), key=lambda item: place[item[0]])
    ]
    reads = [{name for position in positions for name in graph.nodes[position].reads} for positions in needed]
    loaded = [set().union(*reads), *(set() for _ in stages[1:])] if read_once else reads

    def build(index: int) -> Stage:
        nodes = [graph.nodes[position] for position in sorted(needed[index])]
        return Stage(
            index=index,
            nodes=tuple(node.name for node in nodes),
            inputs=tuple(name for name in graph.inputs if name in loaded[index]),
            state=tuple(dict.fromkeys(name for node in nodes for name in node.state)),
            received=tuple(transfer for transfer in transfers if transfer.target == index),
            sent=tuple(transfer for transfer in transfers if transfer.source == index),
            flops=sum(node.flops for node in nodes),
            has_loss=stage_of[graph.producer[graph.loss]] == index,
        )

    built = tuple(build(index) for index in range(len(stages)))
    for buffer in sorted(graph.written_buffers):
        holders = [stage.index for stage in built if buffer in stage.state]
        if len(holders) > 1:
            raise PlanError(
                f"stages: {', '.join(map(str, holders))} all use the buffer {buffer}, which the model writes to; "
                "one stage must hold all operations that use it"
            )
    return built
