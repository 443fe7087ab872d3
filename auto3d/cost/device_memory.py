"""The bytes that a Plan needs on each pipeline device, predicted from the Graph and the order of operations.

This counts what the runtime holds on purpose: state, what autograd keeps for micro-batches in flight, messages, and the
operands of the largest operation. An allocator's fragments, a library's workspace and the process itself come on top.
"""

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from itertools import pairwise

from auto3d.capture.graph import Graph, GraphNode, Value
from auto3d.partition.segment import Segment, segments
from auto3d.partition.stage import Stage, cut
from auto3d.plan import Plan
from auto3d.schedule.lowering import lower
from auto3d.schedule.operation import Kind, Schedule
from auto3d.schedule.program import Message, PipeStage, Program, Step, messages_in_memory
from auto3d.schedule.weight_versions import weight_versions

MessageBytes = Callable[[Step, Collection[Message], Collection[Message]], int]
"""Arguments: a step, the messages posted for receiving, and the messages sent but not yet complete."""


@dataclass(frozen=True, kw_only=True)
class DeviceMemory:
    """Peak bytes of a rank on one pipeline device."""

    weights: int  # parameters, buffers and constants of its stages, each once
    copies: int  # copies of the weights in low precision, of every version
    versions: int  # older versions of the weights under an asynchronous schedule
    gradients: int
    optimizer: int
    activations: int  # activations kept for pending backwards
    inputs: int  # inputs of the stages for these micro-batches, and values passed between the segments of a stage
    messages: int  # messages received but not yet used, and messages sent but not yet released
    working: int  # inputs and results of the largest single operation, or temporaries of the optimizer's update

    @property
    def total(self) -> int:
        return sum(getattr(self, item.name) for item in fields(self))

    def __str__(self) -> str:
        """``2.31 GiB: weights 0.5, gradients 0.5, …``, largest first."""
        entries = sorted(((getattr(self, item.name), item.name) for item in fields(self)), reverse=True)
        listed = ", ".join(f"{name} {in_gib(size)}" for size, name in entries if size)
        return f"{in_gib(self.total)} GiB: {listed}"


def in_gib(size: float) -> str:
    return f"{size / 2**30:.3g}"


def predict(
    graph: Graph,
    plan: Plan,
    schedule: Schedule,
    *,
    optimizer_copies: float | Callable[[Sequence[int]], float],
    update_copies: tuple[int, int] = (0, 0),
    sums_have_copies: bool = False,
) -> tuple[DeviceMemory, ...]:
    """The peak memory of each pipeline device.

    ``graph`` is captured at the number of samples that one operation of ``schedule`` runs. Under tensor parallelism
    it is the local Graph, and the stages of ``plan`` are those of the local Graph too. The optimizer's state is
    ``optimizer_copies`` times each trained parameter, or has as many elements as ``optimizer_copies`` gives for its
    shape. An update allocates ``update_copies`` times the parameter at hand and the parameter before it; (0, 0) where
    the device has fused kernels for the update. Under ZeRO-1 each rank keeps the state of a slice of the weights, and
    with ``sums_have_copies`` it receives the other ranks' gradients of its slice before it adds them.
    """
    stages = cut(graph, plan.stages)
    footprints = [
        _footprint(graph, stage, planned.kept if stage.index in schedule.recompute else None, replicas=planned.replicas)
        for stage, planned in zip(stages, plan.stages, strict=True)
    ]
    alive = weight_versions(schedule)
    sizes = {
        name: value.bytes
        for group in (graph.parameters, graph.buffers, graph.constants)
        for name, value in group.items()
    }
    message_bytes = _message_bytes(stages, plan, schedule)
    sharers = _sharers(plan, schedule, stages, graph.trained)
    programs = lower(schedule, [transfer for stage in stages for transfer in stage.received])
    predicted = []
    for device, program in enumerate(programs):
        here = [pipe_stage for pipe_stage, home in schedule.device_of.items() if home == device]
        state = {name for stage, _ in here for name in stages[stage].state}
        trained = state & graph.trained
        learned = sum(sizes[name] for name in trained)
        held = sum(_state_bytes(graph.parameters[name], optimizer_copies) // sharers[name] for name in trained)
        updated = [
            _updated({name: sizes[name] for name in stages[stage].state if name in trained}, sharers)
            for stage, _ in here
        ]
        update = max((_update(parameters, *update_copies) for parameters in updated), default=0)
        received = sum(sizes[name] * (sharers[name] - 1) // sharers[name] for name in trained)
        activations, inputs, messages, working = _peak(
            program,
            footprints,
            schedule.device_of,
            message_bytes,
            working=max((footprints[stage].working for stage, _ in here), default=0),
            update=update,
            received=received if sums_have_copies else 0,
        )
        predicted.append(
            DeviceMemory(
                weights=sum(sizes[name] for name in state),
                versions=sum(
                    (alive[stage, pipe] - 1) * sum(sizes[n] for n in graph.trained.intersection(stages[stage].state))
                    for stage, pipe in here
                ),
                gradients=learned,
                copies=sum(alive[stage, pipe] * _copies(graph, stages[stage]) for stage, pipe in here),
                optimizer=held,
                activations=activations,
                inputs=inputs,
                messages=messages,
                working=working,
            )
        )
    return tuple(predicted)


def _sharers(plan: Plan, schedule: Schedule, stages: Sequence[Stage], trained: Collection[str]) -> dict[str, int]:
    """The number of ranks that share the optimizer's state of each parameter: its holders under ZeRO-1, else 1."""
    devices: dict[str, set[int]] = {name: set() for name in trained}
    for (stage, _), device in schedule.device_of.items():
        for name in stages[stage].state:
            if name in devices:
                devices[name].add(device)
    if not plan.shard_optimizer:
        return dict.fromkeys(devices, 1)
    return {name: sum(len(plan.placement[device]) for device in here) // plan.tp for name, here in devices.items()}


def _state_bytes(parameter: Value, copies: float | Callable[[Sequence[int]], float]) -> int:
    """Bytes of the optimizer's state of ``parameter``, on all ranks that share it together."""
    if callable(copies):
        return int(copies(parameter.shape) * parameter.item_bytes)
    return int(copies * parameter.bytes)


def _updated(sizes: Mapping[str, int], sharers: Mapping[str, int]) -> list[int]:
    """Bytes of each tensor of an update, in order: parameters, and one slice of all that are sharded."""
    whole = [size for name, size in sizes.items() if sharers[name] == 1]
    sliced = sum(size // sharers[name] for name, size in sizes.items() if sharers[name] > 1)
    return [*whole, sliced] if sliced else whole


def _update(parameters: Sequence[int], of_this: int, of_the_last: int) -> int:
    """Peak bytes of temporaries while parameters of these sizes are updated one after the other."""
    return max(of_this * size + of_the_last * before for before, size in pairwise((0, *parameters, 0)))


@dataclass(frozen=True, kw_only=True)
class _Footprint:
    """Bytes of one micro-batch on one replica of a stage, which takes an equal slice of its samples."""

    inputs: int  # inputs held from the forward until the backward, in addition to activations
    kept: int  # activations held from the forward on
    again: int  # activations that a recomputation adds
    inside: int  # peak activations of a backward that recomputes one segment after the other
    put_off: int  # bytes that a split backward keeps for its weight half
    working: int  # gradients of the operands of the largest operation, as many bytes as the operands themselves


def _footprint(graph: Graph, stage: Stage, kept: tuple[tuple[int, int], ...] | None, *, replicas: int) -> _Footprint:
    """The footprint of ``stage``. ``kept`` is None where the stage does not recompute."""

    def per_replica(size: int) -> int:
        return -(-size // replicas)

    divided = segments(graph, stage, [(0, len(graph.nodes))] if kept is None else kept)
    node_of = {node.name: node for node in graph.nodes}
    sizes = [(segment.kept, _activations([node_of[name] for name in segment.nodes], segment)) for segment in divided]
    before = total = sum(size for is_kept, size in sizes if is_kept)  # kept activations up to the current segment
    inside = total
    for is_kept, size in reversed(sizes):
        inside = max(inside, before if is_kept else before + size)
        before -= size if is_kept else 0
    inputs = {name for segment in divided for name in segment.takes}
    nodes = [node_of[name] for name in stage.nodes]
    put_off = sum(_bytes(graph, node.reads) + _made(node) for node in nodes if _has_weight_half(graph, node))
    return _Footprint(
        inputs=per_replica(_bytes(graph, inputs)),
        kept=per_replica(total),
        again=per_replica(sum(size for is_kept, size in sizes if not is_kept)),
        inside=per_replica(inside),
        put_off=per_replica(put_off),
        working=max(per_replica(_bytes(graph, node.reads) + _made(node)) + _weights(graph, node) for node in nodes),
    )


def _activations(nodes: Iterable[GraphNode], segment: Segment) -> int:
    """Bytes of what a segment makes and a backward needs, its own or a later segment's; each tensor counts once."""
    needed = set(segment.gives)
    made: dict[str, int] = {}
    total = 0
    for node in nodes:
        needed.update(node.saves)
        made |= {value.name: value.bytes for value in node.outputs}
        total += node.saved_bytes
    return total + sum(size for name, size in made.items() if name in needed)


def _copies(graph: Graph, stage: Stage) -> int:
    """Bytes of the low-precision copies of one version of the weights of ``stage``."""
    inside = set(stage.nodes)
    names = {name for node in graph.nodes if node.name in inside for name in node.copies}
    return sum(graph.copies[name].bytes for name in names)


def _weights(graph: Graph, node: GraphNode) -> int:
    """Bytes of the gradients of its weights. That of a copy becomes one of the weight's type before it is added."""
    of_copies = sum(graph.copies[name].bytes for name in node.copies)
    return of_copies + sum(graph.parameters[name].bytes for name in node.state if name in graph.parameters)


def _has_weight_half(graph: Graph, node: GraphNode) -> bool:
    """Whether the node multiplies by weights: their gradient needs what it reads and the gradient of what it makes."""
    return node.backward_flops > 0 and any(name in graph.parameters for name in node.state)


def _bytes(graph: Graph, names: Iterable[str]) -> int:
    return sum((graph.inputs[name] if name in graph.inputs else graph.value(name)).bytes for name in names)


def _made(node: GraphNode) -> int:
    return sum(value.bytes for value in node.outputs)


def _peak(
    program: Program,
    footprints: Sequence[_Footprint],
    device_of: Mapping[PipeStage, int],
    message_bytes: MessageBytes,
    *,
    working: int,
    update: int,
    received: int,
) -> tuple[int, int, int, int]:
    """(activations, inputs, messages, temporaries) at the step where their sum is largest.

    Any operation on micro-batches takes ``working`` bytes of temporaries, and the optimizer's update takes ``update``
    bytes: under most schedules it runs when no activations are held. From the first sum of gradients until the update,
    ``received`` bytes of other ranks' gradients count as messages.
    """
    recomputed: set[tuple[int, int, int]] = set()
    split = {(s.operation.stage, s.operation.pipe) for s in program.steps if s.operation.kind is Kind.BACKWARD_WEIGHT}
    activations = inputs = summing = 0
    peak = (0, 0, 0, working)
    for step, (posted, sent) in zip(program.steps, messages_in_memory(program, device_of), strict=True):
        operation = step.operation
        bytes_of = footprints[operation.stage]
        messages = message_bytes(step, posted, sent)
        if operation.kind is Kind.SYNC:
            summing = received
        messages += summing
        if operation.kind is Kind.UPDATE:
            peak = max(peak, (activations, inputs, messages, 0), key=sum)
            messages, summing = messages - summing, 0
            peak = max(peak, (activations, inputs, messages, update), key=sum)
        for micro_batch in operation.micro_batches:
            key = operation.stage, operation.pipe, micro_batch
            if operation.kind is Kind.FORWARD:
                activations += bytes_of.kept
                inputs += bytes_of.inputs
            elif operation.kind is Kind.RECOMPUTE:
                activations += bytes_of.again
                recomputed.add(key)
            elif operation.kind is Kind.BACKWARD_WEIGHT:
                activations -= bytes_of.put_off
            else:
                inside = 0 if key in recomputed else bytes_of.inside - bytes_of.kept
                peak = max(peak, (activations + inside, inputs, messages, working), key=sum)
                activations -= bytes_of.kept + (bytes_of.again if key in recomputed else 0)
                activations += bytes_of.put_off if (operation.stage, operation.pipe) in split else 0
                inputs -= bytes_of.inputs
            peak = max(peak, (activations, inputs, messages, working), key=sum)
    return peak


def _message_bytes(stages: Sequence[Stage], plan: Plan, schedule: Schedule) -> MessageBytes:
    """A function that gives the bytes of the messages that a rank holds at a step.

    It leaves out the messages that a forward receives at this step, which count as its inputs, and those that a forward
    sends, which are among its activations unless the stage drops them to recompute.
    """
    whole: Counter[tuple[Kind, int, int]] = Counter()
    for transfer in (transfer for stage in stages for transfer in stage.received):
        whole[Kind.FORWARD, transfer.source, transfer.target] += transfer.value.bytes
        whole[Kind.BACKWARD, transfer.target, transfer.source] += transfer.value.bytes * transfer.value.differentiable

    def size(message: Message, here: int) -> int:
        return -(-whole[message.kind, message.source, message.target] // plan.stages[here].replicas)

    def at_step(step: Step, posted: Collection[Message], sent: Collection[Message]) -> int:
        received = step.receives if step.operation.kind is Kind.FORWARD else ()
        return sum(size(m, m.target) for m in posted if m not in received) + sum(
            size(m, m.source) for m in sent if m.kind is not Kind.FORWARD or m.source in schedule.recompute
        )

    return at_step
