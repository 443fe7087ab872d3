"""A Problem and its choices as flat arrays, and an order of operations as numbers: what the compiled search works on.

The micro-batches of a pipe are identical. Whatever order devices run them in, renumbering them by the order in which
each stage takes them yields an order that is as fast and holds as much: the n-th F of a stage finds n results of the
stage before it, whichever they are, and so do B, I, R and W. So each stage takes micro-batches in ascending order in
every kind of operation, and an order is only which kind of which stage comes next on each device.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from auto3d.schedule.operation import Kind, Operation, Schedule
from auto3d.schedule.order_text import NAME
from auto3d.schedule.sync import place_syncs
from auto3d.synthesis.problem import Problem

FORWARD, BACKWARD, WEIGHT, RECOMPUTE = range(4)  # numbers of kinds; BACKWARD is B, or I on a stage that splits
TINY = 1e-30  # in place of a time or a size of 0, where it divides


@dataclass(frozen=True, kw_only=True)
class BackwardChoices:
    """The stages of an order that recompute, and the stages whose backward is I and W."""

    recompute: frozenset[int] = frozenset()
    split: frozenset[int] = frozenset()


class Tables(NamedTuple):
    """Arrays by kind, pipe stage (Q of them, each a stage on one pipe), device (D), and link between two devices."""

    device: np.ndarray  # [Q]
    before: np.ndarray  # [Q] the pipe stage whose F it waits for; -1: none
    after: np.ndarray  # [Q] the pipe stage whose B or I it waits for; -1: none
    micro_batches: np.ndarray  # [Q]
    exists: np.ndarray  # [4, Q] whether the order has such operations
    duration: np.ndarray  # [4, Q]
    message: np.ndarray  # [2, Q] time of the message that follows F, and B or I
    link: np.ndarray  # [2, Q] its link; -1: no message to another device
    during: np.ndarray  # [4, Q] change of what the device holds while the operation runs
    later: np.ndarray  # [4, Q] and after it
    needed: np.ndarray  # [Q] most that a micro-batch holds on the device of an F until it has come back to it
    free: np.ndarray  # [D]
    links: int
    overlap: bool
    stage: np.ndarray  # [Q]
    pipe: np.ndarray  # [Q]
    sync: np.ndarray  # [Q]
    update: np.ndarray  # [Q]


def tables_of(problem: Problem, choices: BackwardChoices) -> Tables:
    """The arrays of ``problem`` under ``choices``."""
    pipe_stages = sorted(problem.device_of)
    number = {pipe_stage: index for index, pipe_stage in enumerate(pipe_stages)}
    size, costs = len(pipe_stages), problem.costs
    device = np.array([problem.device_of[pipe_stage] for pipe_stage in pipe_stages], np.int32)
    exists, duration = np.zeros((4, size), np.bool_), np.zeros((4, size))
    message, link = np.zeros((2, size)), np.full((2, size), -1, np.int32)
    during, later = np.zeros((4, size)), np.zeros((4, size))
    links: dict[tuple[int, int], int] = {}
    for index, (stage, pipe) in enumerate(pipe_stages):
        whole, deferred = problem.activation[stage], problem.deferred[stage]
        recomputes, splits = stage in choices.recompute, stage in choices.split
        kept = problem.kept[stage] if recomputes else whole
        times = [costs.forward[stage], costs.backward[stage], 0.0, costs.recompute[stage]]
        if splits:
            times[BACKWARD], times[WEIGHT] = costs.backward_input[stage], costs.backward_weight[stage]
        else:
            deferred = 0.0
        exists[:, index] = (True, True, splits, recomputes)
        duration[:, index] = np.array(times) / costs.speed[device[index]]
        during[:, index] = (kept, 0.0, 0.0, whole - kept)
        later[:, index] = (kept, deferred - whole, -deferred, whole - kept)
        for kind, target in ((FORWARD, stage + 1), (BACKWARD, stage - 1)):
            receiver = problem.device_of.get((target, pipe))
            if receiver is None or receiver == device[index]:
                continue
            cost = costs.messages[min(stage, target)]
            message[kind, index] = cost.latency + (cost.forward if target > stage else cost.backward)
            link[kind, index] = links.setdefault((int(device[index]), receiver), len(links))
    stages = np.array([stage for stage, _ in pipe_stages], np.int32)
    return Tables(
        device=device,
        before=np.array([number.get((stage - 1, pipe), -1) for stage, pipe in pipe_stages], np.int32),
        after=np.array([number.get((stage + 1, pipe), -1) for stage, pipe in pipe_stages], np.int32),
        micro_batches=np.array([problem.per_pipe[pipe] for _, pipe in pipe_stages], np.int32),
        exists=exists,
        duration=duration,
        message=message,
        link=link,
        during=during,
        later=later,
        needed=_needed(pipe_stages, device, during),
        free=np.array(problem.free) * (1 + 1e-9),
        links=len(links),
        overlap=costs.overlap,
        stage=stages,
        pipe=np.array([pipe for _, pipe in pipe_stages], np.int32),
        sync=np.array(costs.sync, np.float64)[stages],  # numba would compile all for whole numbers again
        update=np.array(costs.update)[stages] / np.array(costs.speed)[device],
    )


def _needed(pipe_stages: Sequence[tuple[int, int]], device: np.ndarray, during: np.ndarray) -> np.ndarray:
    """Per pipe stage, the peak of its device if one micro-batch alone goes on from there to the last stage and back."""
    needed = np.zeros(len(pipe_stages))
    for index, (stage, pipe) in enumerate(pipe_stages):
        held = 0.0
        for other, (later, its_pipe) in enumerate(pipe_stages):
            if its_pipe == pipe and later >= stage and device[other] == device[index]:
                needed[index] = max(needed[index], held + during[FORWARD, other] + during[RECOMPUTE, other])
                held += during[FORWARD, other]
    return needed


def bounds_of(tables: Tables) -> np.ndarray:
    """D + 1 numbers: the operations of device d have the positions from ``bounds[d]`` to ``bounds[d + 1] - 1``."""
    per_pipe_stage = tables.exists.sum(0) * tables.micro_batches
    totals = np.bincount(tables.device, weights=per_pipe_stage, minlength=len(tables.free))
    return np.concatenate(([0], np.cumsum(totals))).astype(np.int32)


def schedule_of_order(problem: Problem, choices: BackwardChoices, order: np.ndarray, bounds: np.ndarray) -> Schedule:
    """The Schedule of ``order``, whose entries are kind × Q + pipe stage, one device after the other."""
    pipe_stages = sorted(problem.device_of)
    size = len(pipe_stages)
    first = np.concatenate(([0], np.cumsum(problem.per_pipe)))  # number of the first micro-batch of each pipe
    kinds = {FORWARD: Kind.FORWARD, WEIGHT: Kind.BACKWARD_WEIGHT, RECOMPUTE: Kind.RECOMPUTE}
    counts = [0] * (4 * size)
    devices = []
    for begin, stop in pairwise(bounds.tolist()):
        operations = []
        for code in order[begin:stop].tolist():
            kind, index = divmod(code, size)
            stage, pipe = pipe_stages[index]
            split = Kind.BACKWARD_INPUT if stage in choices.split else Kind.BACKWARD
            micro_batch = int(first[pipe]) + counts[code]
            counts[code] += 1
            operations.append(Operation(kinds.get(kind, split), stage, (micro_batch,), pipe))
        devices.append(tuple(operations))
    schedule = Schedule(
        name=NAME,
        stages=problem.stages,
        micro_batches=problem.micro_batches,
        device_of=dict(problem.device_of),
        operations=tuple(devices),
        recompute=choices.recompute,
        held_ahead=problem.micro_batches,
    )
    return place_syncs(schedule, "lazy")


def orders_of_one_at_a_time(problem: Problem, choices: BackwardChoices) -> Iterator[np.ndarray]:
    """Orders in which each micro-batch begins when the micro-batch before it has ended, which needs the least memory.

    The micro-batches of several pipes take turns, or all of one pipe come before all of the next; the first pipe
    begins, or the last pipe.
    """
    for pipes in sorted({tuple(range(problem.pipes)), tuple(reversed(range(problem.pipes)))}):
        grouped = [pipe for pipe in pipes for _ in range(problem.per_pipe[pipe])]
        in_turns = [pipe for turn in range(problem.per_pipe[0]) for pipe in pipes if turn < problem.per_pipe[pipe]]
        yield _one_at_a_time(problem, choices, grouped)
        if in_turns != grouped:
            yield _one_at_a_time(problem, choices, in_turns)


def _one_at_a_time(problem: Problem, choices: BackwardChoices, turns: Sequence[int]) -> np.ndarray:
    """The order in which a micro-batch of each pipe of ``turns`` runs alone."""
    pipe_stages = sorted(problem.device_of)
    size = len(pipe_stages)
    devices: list[list[int]] = [[] for _ in range(problem.devices)]
    for pipe in turns:
        mine = [index for index, (_, its_pipe) in enumerate(pipe_stages) if its_pipe == pipe]
        for index in mine:
            devices[problem.device_of[pipe_stages[index]]].append(FORWARD * size + index)
        for index in reversed(mine):
            stage = pipe_stages[index][0]
            kinds = [RECOMPUTE] * (stage in choices.recompute) + [BACKWARD] + [WEIGHT] * (stage in choices.split)
            devices[problem.device_of[pipe_stages[index]]] += [kind * size + index for kind in kinds]
    return np.array([code for codes in devices for code in codes], np.int32)


def with_choices(tables: Tables, order: np.ndarray, choices: BackwardChoices) -> np.ndarray:
    """``order`` under other ``choices``: each new R comes right before its backward, each new W right after it."""
    size = len(tables.device)
    splits = np.isin(tables.stage, list(choices.split))
    recomputes = np.isin(tables.stage, list(choices.recompute))
    codes: list[int] = []
    for code in order.tolist():
        kind, index = divmod(code, size)
        if (kind == RECOMPUTE and not recomputes[index]) or (kind == WEIGHT and not splits[index]):
            continue
        if kind == BACKWARD and recomputes[index] and not tables.exists[RECOMPUTE, index]:
            codes.append(RECOMPUTE * size + index)
        codes.append(code)
        if kind == BACKWARD and splits[index] and not tables.exists[WEIGHT, index]:
            codes.append(WEIGHT * size + index)
    return np.array(codes, np.int32)


def order_of_schedule(problem: Problem, schedule: Schedule) -> tuple[BackwardChoices, np.ndarray] | None:
    """The choices and the order of ``schedule``, renumbered; None if an order cannot express it.

    That is so if an operation has several micro-batches or parts of one, if a stage splits only some backwards, or if
    pipes have other numbers of micro-batches. A recomputation inside a backward becomes an R right before it.
    """
    if schedule.parts > 1 or schedule.device_of != problem.device_of or schedule.micro_batches != problem.micro_batches:
        return None
    pipe_stages = sorted(problem.device_of)
    number = {pipe_stage: index for index, pipe_stage in enumerate(pipe_stages)}
    size = len(pipe_stages)
    split = frozenset(o.stage for row in schedule.operations for o in row if o.kind is Kind.BACKWARD_INPUT)
    kinds = {
        Kind.FORWARD: FORWARD,
        Kind.BACKWARD: BACKWARD,
        Kind.BACKWARD_INPUT: BACKWARD,
        Kind.BACKWARD_WEIGHT: WEIGHT,
        Kind.RECOMPUTE: RECOMPUTE,
    }
    order: list[int] = []
    for operations in schedule.operations:
        early = {(o.stage, o.micro_batches) for o in operations if o.kind is Kind.RECOMPUTE}
        for operation in operations:
            if operation.kind in (Kind.SYNC, Kind.UPDATE):
                continue
            if len(operation.micro_batches) != 1 or (operation.kind is Kind.BACKWARD and operation.stage in split):
                return None
            index, kind = number[operation.stage, operation.pipe], kinds[operation.kind]
            inside = operation.stage in schedule.recompute and (operation.stage, operation.micro_batches) not in early
            if kind == BACKWARD and inside:
                order.append(RECOMPUTE * size + index)
            order.append(kind * size + index)
    choices = BackwardChoices(recompute=schedule.recompute, split=split)
    tables = tables_of(problem, choices)
    counted = np.bincount(order, minlength=4 * size).reshape(4, size)
    if (counted != tables.exists * tables.micro_batches).any():
        return None
    return choices, np.array(order, np.int32)
