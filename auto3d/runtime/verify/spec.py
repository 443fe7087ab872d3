"""What may stand where in the programs of a plan: one table of rules, which a machine checks.

After tinygrad's ``uop/spec.py``. A rule looks at the finished programs, so it holds whoever made them.
"""

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence

from torch import fx

from auto3d.capture.nodes import args_of, operands_of
from auto3d.conversions import conversion_of
from auto3d.derived.model import Derived
from auto3d.derived.of_share import derived
from auto3d.partition.stage import cut
from auto3d.runtime.layout import PlanLayout, RankLayout, lay_out_rank
from auto3d.runtime.rank import programs_of
from auto3d.runtime.replicas import rank_program
from auto3d.schedule.program import GradientSum, LossSum
from auto3d.share import share_of
from auto3d.tensor.collectives import split_of
from auto3d.tensor.operations import has_gradient
from auto3d.tensor.rules.call import Way
from auto3d.tensor.ways import operations_of
from auto3d.tensor_placement import COPIED, PARTIAL, WHOLE, TensorPlacement

Placed = Mapping[fx.Node, TensorPlacement]


def _needs(node: fx.Node, placed: Placed) -> Iterator[TensorPlacement]:
    """The placements of what ``node`` takes. For a call within it, which is no value of the model: what that takes."""
    for operand in operands_of(node):
        yield from [placed[operand]] if operand in placed else _needs(operand, placed)


def _operators(model: Derived, placed: Placed) -> Iterator[str]:
    local = {node.name: node for node in placed}
    names = {**model.whole.exported.parameters, **model.whole.exported.buffers}
    pinned = {placeholder: model.split.get(name) for placeholder, name in names.items()}
    for operation in operations_of(model.whole, model.share, pinned=pinned):
        call = operation.call
        if not call.result_nodes:
            continue
        results = {call.number_of(node): local[node.name] for node in call.result_nodes}
        made = local.get(call.node.name) or operands_of(next(iter(results.values())))[0]  # a tuple has no placement
        needs, gives = list(_needs(made, placed)), {number: placed[node] for number, node in results.items()}
        if not any(_fits(way, call.operands, needs, gives) for way in operation.ways):
            words = f"{', '.join(map(str, needs))} -> {', '.join(map(str, gives.values()))}"
            yield f"{call.node.name} ({call.operator}): {words}"


def _fits(
    way: Way, operands: Sequence[fx.Node], needs: Sequence[TensorPlacement], gives: Mapping[int, TensorPlacement]
) -> bool:
    """Whether ``way`` takes and gives it. In place of a copied operand without a gradient it takes a whole operand."""
    return all(way.gives[place] == placement for place, placement in gives.items()) and all(
        given == need or (given == WHOLE and need == COPIED and not has_gradient(operand))
        for need, given, operand in zip(way.needs, needs, operands, strict=True)
    )


def _conversions(model: Derived, placed: Placed) -> Iterator[str]:
    for node, gives in placed.items():
        if (conversion := conversion_of(node.target)) is not None:
            takes = placed[operands_of(node)[0]]
            as_split = (takes.split or gives.split) == split_of(args_of(node))
            if (takes.kind, gives.kind) != (conversion.source, conversion.target) or not as_split:
                yield f"{node.name}: {takes} -> {gives} by {conversion.name}"


def _shapes(model: Derived, placed: Placed) -> Iterator[str]:
    whole = {node.name: node.meta.get("val") for node in model.whole.exported.program.nodes}
    for node, placement in placed.items():
        if conversion_of(node.target) is not None:
            whole[node.name] = whole[operands_of(node)[0].name]
        shape = tuple(whole[node.name].shape)
        if (local_shape := tuple(node.meta["val"].shape)) != (expected := placement.local_shape(shape, model.share.tp)):
            yield f"{node.name}: {list(local_shape)}, but {placement} of {list(shape)} is {list(expected)}"


def _partial(common: PlanLayout) -> Iterator[str]:
    program = rank_program(common.captured, common.plan, 1)
    placements = {} if program.derived is None else program.derived.placements
    for stage in cut(program.captured.graph, program.plan.stages):
        for transfer in stage.received:
            if placements.get(transfer.value.name) == PARTIAL:
                yield f"{transfer.value.name}, from stage {transfer.source} to {transfer.target}"


def _sums(common: PlanLayout) -> Iterator[str]:
    layouts = [lay_out_rank(common, rank) for rank in range(common.plan.ranks)]
    having: dict[tuple[str, int | None], list[int]] = defaultdict(list)  # parameter and shard -> ranks
    for rank, layout in enumerate(layouts):
        for name in {name for stage in layout.stages.values() for name in stage.state} & layout.holders.keys():
            having[_part(layout, name)].append(rank)
    for rank, layout in enumerate(layouts):
        for name, holding in layout.holders.items():
            expected, how = tuple(having[_part(layout, name)]), common.plan.gradient_sum
            if (holding.ranks, holding.conversion) != (expected, how):
                yield (
                    f"{name} on rank {rank}: {holding.conversion.name} among ranks {holding.ranks}, "
                    f"but its gradient is partial over {expected}, and the plan says {how.name}"
                )


def _part(layout: RankLayout, name: str) -> tuple[str, int | None]:
    """What a gradient is of: a parameter, and the rank's shard unless it is copied, so partial over all of them."""
    return name, None if layout.placement_of(name) == COPIED else layout.shard


def _orders(common: PlanLayout) -> Iterator[str]:
    orders: dict[str, dict[int, list[str]]] = defaultdict(dict)  # communicator -> rank -> what it runs there
    for rank in range(common.plan.ranks):
        for communicator, runs in _run_by(lay_out_rank(common, rank), rank):
            orders[communicator].setdefault(rank, []).extend(runs)
    for communicator, of_rank in orders.items():
        (first, expected), *others = of_rank.items()
        for rank, order in others:
            if order != expected:
                yield f"{communicator}, rank {rank}: {', '.join(order)}; rank {first}: {', '.join(expected)}"


def _run_by(layout: RankLayout, rank: int) -> Iterator[tuple[str, list[str]]]:
    """(communicator, what ``rank`` runs there) for each of its steps, in order."""
    groups = [f"tensor-parallel ranks {group}" for group in layout.tensor_groups if rank in group]
    holders = {holding for holding in layout.holders.values() if rank in holding.ranks and len(holding.ranks) > 1}
    device_of, here = layout.schedule.device_of, f"pipeline {layout.pipeline}"
    sums = {holding: f"gradients of stages {holding.stages} on {holding}" for holding in holders}
    yield from ((sums[holding], []) for holding in holders)
    for step in (step for program in programs_of(layout) for step in program.steps):
        for communication in step.begins:
            if isinstance(communication, GradientSum):
                summed = [holding for holding in holders if holding.stages == communication.stages]
                yield from ((sums[holding], [f"{communication} by {holding.conversion.name}"]) for holding in summed)
            elif isinstance(communication, LossSum):
                yield "all ranks", [f"{communication}"]
        yield from ((group, [f"{step.operation}"]) for group in groups)
        for message in (*step.posts, *step.sends):
            devices = device_of[message.source, message.pipe], device_of[message.target, message.pipe]
            if devices[0] != devices[1]:
                yield f"messages from device {devices[0]} to {devices[1]}, {here}", [f"{message}"]


Broken = Callable[[PlanLayout], Iterator[str]]


def _of_shards(broken: Callable[[Derived, Placed], Iterator[str]]) -> Broken:
    """``broken`` for the program of a tensor-parallel rank, before slices or halves divide it further."""

    def of_plan(common: PlanLayout) -> Iterator[str]:
        if common.plan.tp > 1:
            model = derived(common.captured, share_of(common.plan), split=common.plan.split)
            exported = model.program.exported
            state = {**exported.parameters, **exported.buffers}
            placed = ((node, model.placements.get(state.get(node.name, node.name))) for node in exported.program.nodes)
            yield from broken(model, {node: placement for node, placement in placed if placement is not None})

    return of_plan


SPEC: dict[str, Broken] = {
    "an operator takes and gives placements as its rule says": _of_shards(_operators),
    "a conversion takes and gives the placements of its name": _of_shards(_conversions),
    "a rank has the part of a value that its placement says": _of_shards(_shapes),
    "no partial value leaves a stage": _partial,
    "a gradient is summed by all ranks over which it is partial, as the plan says": _sums,
    "all ranks of a communicator run the same there, in the same order": _orders,
}
"""What must hold -> the places of a plan where it does not, in words."""
