"""The bytes that a Plan needs on each pipeline device, predicted from the Graph and the order of operations.

Counted is what the runtime holds on purpose: state, what autograd keeps for micro-batches in flight, messages, and what
the largest operation works on. An allocator's fragments, a library's workspace and the process itself come on top.
"""

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from itertools import pairwise

from auto3d.capture.graph import Graph, Node
from auto3d.partition.segment import Segment, segments
from auto3d.partition.stage import Stage, cut
from auto3d.plan import Plan
from auto3d.schedule.lowering import lower
from auto3d.schedule.operation import Kind, Schedule
from auto3d.schedule.program import Message, PipeStage, Program, Step, messages_in_memory
from auto3d.schedule.weight_versions import weight_versions


@dataclass(frozen=True, kw_only=True)
class DeviceMemory:
    """Bytes that a rank on one pipeline device holds at its fullest."""

    weights: int  # parameters, buffers and constants of its stages, each once
    versions: int  # older versions of them, where the schedule is asynchronous
    gradients: int
    optimizer: int
    activations: int  # that wait for their backward
    given: int  # of these micro-batches, what their stages were given, and what passes between parts of one
    messages: int  # those posted and not used yet, and those sent and not forgotten yet
    working: int  # inputs and results of the largest single operation, or temporaries of the optimizer's update

    @property
    def total(self) -> int:
        return sum(getattr(self, item.name) for item in fields(self))

    def __str__(self) -> str:
        """``2.31 GiB: weights 0.5, gradients 0.5, …``, largest first."""
        parts = sorted(((getattr(self, item.name), item.name) for item in fields(self)), reverse=True)
        told = ", ".join(f"{name} {in_gib(size)}" for size, name in parts if size)
        return f"{in_gib(self.total)} GiB: {told}"


def in_gib(size: float) -> str:
    return f"{size / 2**30:.3g}"


def predict(
    graph: Graph,
    plan: Plan,
    schedule: Schedule,
    *,
    optimizer_copies: int,
    update_copies: tuple[int, int] = (0, 0),
) -> tuple[DeviceMemory, ...]:
    """Per pipeline device, at its fullest.

    ``graph`` is of the samples that an operation of ``schedule`` runs; ``optimizer_copies`` of each trained parameter
    are the optimizer's state. ``update_copies`` of the parameter at hand, and of the one before it, are what an update
    makes; none where the device has fused kernels for it.
    """
    stages = cut(graph, plan.stages)
    footprints = [
        _footprint(graph, stage, own.kept if stage.index in schedule.recompute else None, replicas=own.replicas)
        for stage, own in zip(stages, plan.stages, strict=True)
    ]
    alive = weight_versions(schedule)
    sizes = {
        name: value.bytes
        for group in (graph.parameters, graph.buffers, graph.constants)
        for name, value in group.items()
    }
    held_at = _messages(stages, plan, schedule)
    programs = lower(schedule, [transfer for stage in stages for transfer in stage.received])
    found = []
    for device, program in enumerate(programs):
        own = [replica for replica, home in schedule.device_of.items() if home == device]
        state = {name for stage, _ in own for name in stages[stage].state}
        learned = sum(sizes[name] for name in state & graph.trained)
        updated = [[sizes[name] for name in stages[stage].state if name in graph.trained] for stage, _ in own]
        update = max((_update(parameters, *update_copies) for parameters in updated), default=0)
        activations, given, messages, working = _fullest(
            program,
            footprints,
            schedule.device_of,
            held_at,
            working=max((footprints[stage].working for stage, _ in own), default=0),
            update=update,
        )
        found.append(
            DeviceMemory(
                weights=sum(sizes[name] for name in state),
                versions=sum(
                    (alive[stage, pipe] - 1) * sum(sizes[n] for n in graph.trained.intersection(stages[stage].state))
                    for stage, pipe in own
                ),
                gradients=learned,
                optimizer=optimizer_copies * learned // (len(plan.placement[device]) if plan.shard_optimizer else 1),
                activations=activations,
                given=given,
                messages=messages,
                working=working,
            )
        )
    return tuple(found)


def _update(parameters: Sequence[int], of_this: int, of_the_last: int) -> int:
    """Temporaries of an update of parameters of so many bytes, one after the other, at their most."""
    return max(of_this * size + of_the_last * before for before, size in pairwise((0, *parameters, 0)))


@dataclass(frozen=True, kw_only=True)
class _Footprint:
    """Bytes of one micro-batch on one replica of a stage; the replicas share its samples."""

    given: int  # from the forward until the backward, beside activations
    kept: int  # activations from the forward on
    again: int  # activations that a recomputation adds
    inside: int  # the most activations at a time where the backward recomputes, segment after segment
    put_off: int  # what a backward that is split leaves to its weight half
    working: int  # gradients of all that the largest operation reads and makes; they are as large as these


def _footprint(graph: Graph, stage: Stage, kept: tuple[tuple[int, int], ...] | None, *, replicas: int) -> _Footprint:
    """``kept`` None: the stage does not recompute."""

    def share(size: int) -> int:
        return -(-size // replicas)

    divided = segments(graph, stage, [(0, len(graph.nodes))] if kept is None else kept)
    node_of = {node.name: node for node in graph.nodes}
    held = [(segment.kept, _activations([node_of[name] for name in segment.nodes], segment)) for segment in divided]
    left = total = sum(size for is_kept, size in held if is_kept)
    inside = total
    for is_kept, size in reversed(held):
        inside = max(inside, left if is_kept else left + size)
        left -= size if is_kept else 0
    given = {name for segment in divided for name in segment.takes}
    nodes = [node_of[name] for name in stage.nodes]
    return _Footprint(
        given=share(_bytes(graph, given)),
        kept=share(total),
        again=share(sum(size for is_kept, size in held if not is_kept)),
        inside=share(inside),
        put_off=share(sum(_bytes(graph, node.reads) + _made(node) for node in nodes if _has_weight_half(graph, node))),
        working=max(share(_bytes(graph, node.reads) + _made(node)) + _weights(graph, node) for node in nodes),
    )


def _activations(nodes: Iterable[Node], segment: Segment) -> int:
    """What a segment makes and its backward needs, or those after it, each tensor once."""
    needed = set(segment.gives)
    made: dict[str, int] = {}
    total = 0
    for node in nodes:
        needed.update(node.saves)
        made |= {value.name: value.bytes for value in node.outputs}
        total += node.saved_bytes
    return total + sum(size for name, size in made.items() if name in needed)


def _weights(graph: Graph, node: Node) -> int:
    return sum(graph.parameters[name].bytes for name in node.state if name in graph.parameters)


def _has_weight_half(graph: Graph, node: Node) -> bool:
    """Whether it multiplies by weights: their gradient needs what it read, and the gradient of what it made."""
    return node.backward_flops > 0 and any(name in graph.parameters for name in node.state)


def _bytes(graph: Graph, names: Iterable[str]) -> int:
    return sum((graph.inputs[name] if name in graph.inputs else graph.value(name)).bytes for name in names)


def _made(node: Node) -> int:
    return sum(value.bytes for value in node.outputs)


def _fullest(
    program: Program,
    footprints: Sequence[_Footprint],
    device_of: Mapping[PipeStage, int],
    held_at: Callable[[Step, Collection[Message], Collection[Message]], int],
    *,
    working: int,
    update: int,
) -> tuple[int, int, int, int]:
    """Activations and given values of all micro-batches, messages, and temporaries, when they are most together.

    ``working`` bytes are those of any operation on micro-batches, ``update`` those of the optimizer's update, which
    under most schedules comes when no activations are held.
    """
    recomputed: set[tuple[int, int, int]] = set()
    split = {(s.operation.stage, s.operation.pipe) for s in program.steps if s.operation.kind is Kind.BACKWARD_WEIGHT}
    activations = given = 0
    fullest = (0, 0, 0, working)
    for step, (posted, sent) in zip(program.steps, messages_in_memory(program, device_of), strict=True):
        operation = step.operation
        bytes_of = footprints[operation.stage]
        messages = held_at(step, posted, sent)
        if operation.kind is Kind.UPDATE:
            fullest = max(fullest, (activations, given, messages, update), key=sum)
        for micro_batch in operation.micro_batches:
            key = operation.stage, operation.pipe, micro_batch
            if operation.kind is Kind.FORWARD:
                activations += bytes_of.kept
                given += bytes_of.given
            elif operation.kind is Kind.RECOMPUTE:
                activations += bytes_of.again
                recomputed.add(key)
            elif operation.kind is Kind.BACKWARD_WEIGHT:
                activations -= bytes_of.put_off
            else:
                inside = 0 if key in recomputed else bytes_of.inside - bytes_of.kept
                fullest = max(fullest, (activations + inside, given, messages, working), key=sum)
                activations -= bytes_of.kept + (bytes_of.again if key in recomputed else 0)
                activations += bytes_of.put_off if (operation.stage, operation.pipe) in split else 0
                given -= bytes_of.given
            fullest = max(fullest, (activations, given, messages, working), key=sum)
    return fullest


def _messages(
    stages: Sequence[Stage], plan: Plan, schedule: Schedule
) -> Callable[[Step, Collection[Message], Collection[Message]], int]:
    """Bytes of the messages that a rank holds at a step, of those ``posted`` and ``sent``.

    A forward's own are left out, for they are given to it; also what a forward sends, which is among its activations,
    unless its stage drops these.
    """
    whole: Counter[tuple[Kind, int, int]] = Counter()
    for transfer in (transfer for stage in stages for transfer in stage.received):
        whole[Kind.FORWARD, transfer.source, transfer.target] += transfer.value.bytes
        whole[Kind.BACKWARD, transfer.target, transfer.source] += transfer.value.bytes * transfer.value.differentiable

    def size(message: Message, here: int) -> int:
        return -(-whole[message.kind, message.source, message.target] // plan.stages[here].replicas)

    def held_at(step: Step, posted: Collection[Message], sent: Collection[Message]) -> int:
        given = step.receives if step.operation.kind is Kind.FORWARD else ()
        return sum(size(m, m.target) for m in posted if m not in given) + sum(
            size(m, m.source) for m in sent if m.kind is not Kind.FORWARD or m.source in schedule.recompute
        )

    return held_at
