"""No program can deadlock, in whatever order devices execute what is queued. Shown without a device.

Lowering proves this of each program, and the proof is itself tested on wrong programs. Then every rank of a grid of
cases goes through its program with the engine's Exchange, whose sends and receives are recorded: what one rank sends,
the other posts, in the same order, and all programs end even if every call blocks.
"""

from collections import Counter, defaultdict
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from auto3d.capture.graph import Value
from auto3d.partition.stage import Transfer
from auto3d.runtime.messages import exchange as exchange_module
from auto3d.runtime.messages.exchange import Exchange
from auto3d.schedule import build_schedule
from auto3d.schedule.check import ScheduleError
from auto3d.schedule.common_order import check_progress
from auto3d.schedule.lowering import lower
from auto3d.schedule.operation import Kind, Schedule
from auto3d.schedule.program import GradientSum, LossSum, Message, Program
from tests.schedule.samples import BY_RULE, options_of, schedules, sizes

SAMPLES = 12  # samples of a micro-batch, on all replicas of a stage together


def crossing(stages: int, *, skips: bool) -> list[Transfer]:
    """Values between neighbouring stages and, with ``skips``, between distant ones, one of them without a gradient."""
    pairs = [(stage, stage + 1, True) for stage in range(stages - 1)]
    if skips and stages > 2:
        pairs += [(0, stages - 1, True), (0, 2, False)] + [(1, stages - 1, True)] * (stages > 3)
    values = [Value(f"v{a}-{b}", (SAMPLES, 2 + a), "float32" if g else "int64", 8, g) for a, b, g in pairs]
    return [Transfer(value=value, source=a, target=b) for value, (a, b, _) in zip(values, pairs, strict=True)]


def sharing(schedule: Schedule, *, tied: bool) -> list[tuple[int, ...]]:
    """Sets of stages whose gradients are summed: each single stage and, if ``tied``, the first with the last."""
    single = [(stage,) for stage in range(schedule.stages)]
    return [*single, (0, schedule.stages - 1)] if tied and schedule.stages > 1 else single


def can_be_tied(schedule: Schedule) -> bool:
    """False for PipeDream, where the two stages would use different versions of the shared weights."""
    return schedule.name != "pipedream"


def all_schedules(devices: int, numbers: Sequence[int]) -> Iterator[Schedule]:
    for name in BY_RULE:
        if name not in ("gems", "shifted-critical-path", "zb-v") or devices > 1:
            yield from schedules(name, devices, list(numbers))


@pytest.mark.parametrize("devices", [2, 3, 4])
def test_every_program_ends_on_devices_that_do_one_operation_at_a_time(devices):
    """``lower`` proves it for each program, or raises. Each sum begins once, on all devices that take part."""
    count = 0
    for schedule in all_schedules(devices, (devices, 2 * devices + 1)):
        for skips, tied in product((False, True), repeat=2):
            if not (tied and not can_be_tied(schedule)):
                count += 1
                transfers = crossing(schedule.stages, skips=skips)
                check_beginnings(schedule, lower(schedule, transfers, sharing(schedule, tied=tied)))
    assert count > 100


@pytest.mark.soak
@pytest.mark.parametrize("devices", [5, 6, 8, 12, 16])
def test_every_larger_program_ends_too(devices):
    for schedule in all_schedules(devices, sizes(devices)):
        tied = can_be_tied(schedule)
        transfers = crossing(schedule.stages, skips=True)
        check_beginnings(schedule, lower(schedule, transfers, sharing(schedule, tied=tied)))


def check_beginnings(schedule: Schedule, programs: Sequence[Program]) -> None:
    for device, program in enumerate(programs):
        begun = [one for step in program.steps for one in step.begins]
        assert len(begun) == len(set(begun))
        own = {replica[0] for replica, home in schedule.device_of.items() if home == device}
        summed = Counter(one.stages for one in begun if isinstance(one, GradientSum))
        updates = schedule.updates * schedule.iterations
        for stage in own:
            assert summed[(stage,)] == updates
        synced: Counter[int] = Counter()  # syncs of this device's stages
        updated: Counter[int] = Counter()
        pipes = Counter(replica[0] for replica, home in schedule.device_of.items() if home == device)
        done: Counter[tuple[int, ...]] = Counter()
        for step in program.steps:
            for one in step.begins:
                if isinstance(one, GradientSum):
                    assert all(synced[s] >= (one.update + 1) * pipes[s] for s in one.stages if s in own), "not ready"
                    done[one.stages] += 1
            kind, stage = step.operation.kind, step.operation.stage
            synced[stage] += kind is Kind.SYNC
            if kind is Kind.UPDATE:
                updated[stage] += 1
                needed = -(-updated[stage] // pipes[stage])
                assert all(done[stages] >= needed for stages in summed if stage in stages), "the sum has not begun"
        losses = [one.iteration for one in begun if isinstance(one, LossSum)]
        assert losses == list(range(len(losses)))
        assert schedule.weight_version or not losses


def moved(program: Program, posts: Mapping[int, Sequence[Message]]) -> Program:
    """``program`` with its receives posted before the steps of ``posts``, ahead of the sums that begin there."""
    steps = [
        replace(step, begins=(*posts.get(n, ()), *(one for one in step.begins if not isinstance(one, Message))))
        for n, step in enumerate(program.steps)
    ]
    return replace(program, steps=tuple(steps))


def two_ahead(program: Program, device_of: Mapping[tuple[int, int], int]) -> Program:
    """``program`` with two receives from each peer posted at its start, and one more after each that is used."""
    waiting: dict[int, list[Message]] = defaultdict(list)
    for step in program.steps:
        for message in step.posts:
            waiting[device_of[message.source, message.pipe]].append(message)
    posts: dict[int, list[Message]] = defaultdict(list)
    for messages in waiting.values():
        posts[0] += messages[:2]
        del messages[:2]
    for number, step in enumerate(program.steps):
        for message in step.receives:
            queue = waiting[device_of[message.source, message.pipe]]
            if queue:
                posts[number + 1].append(queue.pop(0))
    return moved(program, posts)


@pytest.mark.parametrize("name", [name for name in BY_RULE if name != "gpipe"])
def test_the_proof_fails_where_receives_are_posted_two_ahead(name):
    """A receive of a gradient that precedes the forward on which the gradient depends blocks that forward."""
    schedule = build_schedule(name, devices=4, micro_batches=8)
    programs = lower(schedule, crossing(schedule.stages, skips=False))
    check_progress(programs, schedule.device_of)
    with pytest.raises(ScheduleError, match="deadlock if a device does one thing at a time: device 0 at "):
        check_progress([two_ahead(program, schedule.device_of) for program in programs], schedule.device_of)


@pytest.mark.parametrize(("name", "tied"), [("gems", False), ("chimera", False), ("interleaved-1f1b", True)])
def test_the_proof_fails_where_a_sum_begins_when_only_this_device_is_ready(name, tied):
    """The sum would block the device while other devices still need it to become ready."""
    schedule = build_schedule(name, devices=2, micro_batches=5, sync="eager")
    programs = lower(schedule, crossing(schedule.stages, skips=False), sharing(schedule, tied=tied))

    def at_once(device: int, program: Program) -> Program:
        sums = [one for step in program.steps for one in step.begins if isinstance(one, GradientSum)]
        own = {replica for replica, home in schedule.device_of.items() if home == device}
        synced: set[tuple[int, int]] = set()
        steps = []
        for step in program.steps:
            ready = [one for one in sums if all(replica in synced for replica in own if replica[0] in one.stages)]
            sums = [one for one in sums if one not in ready]
            steps.append(replace(step, begins=(*step.posts, *ready)))
            if step.operation.kind is Kind.SYNC:
                synced.add((step.operation.stage, step.operation.pipe))
        return replace(program, steps=tuple(steps))

    with pytest.raises(ScheduleError, match="deadlock if a device does one thing at a time"):
        check_progress([at_once(device, program) for device, program in enumerate(programs)], schedule.device_of)


def test_the_proof_fails_where_a_message_is_not_posted_or_posted_in_another_order():
    schedule = build_schedule("1f1b", devices=3, micro_batches=6)
    first, second, third = lower(schedule, crossing(3, skips=False))
    posts = {number: step.posts for number, step in enumerate(second.steps)}
    number = next(number for number, messages in posts.items() if messages)
    with pytest.raises(ScheduleError, match="which its device neither receives nor makes"):
        check_progress([first, moved(second, {**posts, number: posts[number][1:]}), third], schedule.device_of)
    flat = [message for messages in posts.values() for message in messages if message.source == 0]
    swapped = {flat[0]: flat[1], flat[1]: flat[0]}
    other = {n: [swapped.get(message, message) for message in messages] for n, messages in posts.items()}
    with pytest.raises(ScheduleError):
        check_progress([first, moved(second, other), third], schedule.device_of)


# Every rank, with the engine's Exchange


@dataclass
class Calls:
    """The calls of torch.distributed that the Exchange of one rank makes."""

    connections: list[tuple[int, int]] = field(default_factory=list)  # (sender, receiver)
    calls: list[tuple[Any, ...]] = field(default_factory=list)  # (sender, receiver, group, shape, type), and sums


def calls_of(
    rank: int, program: Program, schedule: Schedule, transfers: Sequence[Transfer], ranks_of: list[list[int]]
) -> Calls:
    """The calls of ``rank`` while it runs ``program``."""
    found, groups = Calls(), iter(("upward", "downward"))
    connecting = True

    def call(tensor: torch.Tensor, peer: int, group: str, *, sends: bool) -> SimpleNamespace:
        assert tensor.is_contiguous()
        pair = (rank, peer) if sends else (peer, rank)
        if connecting:
            found.connections.append(pair)
        else:
            assert pair in found.connections, "the first use of a pair blocks, so it must not come between messages"
            found.calls.append((*pair, group, tuple(tensor.shape), tensor.dtype))
        return SimpleNamespace()

    fake = SimpleNamespace(
        get_rank=lambda: rank,
        get_world_size=lambda: sum(map(len, ranks_of)),
        isend=lambda tensor, peer, group: call(tensor, peer, group, sends=True),
        irecv=lambda tensor, peer, group: call(tensor, peer, group, sends=False),
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(exchange_module, "dist", fake)
        patch.setattr(exchange_module, "new_group", lambda *_, **__: next(groups))
        patch.setattr(exchange_module, "wait", lambda *_, **__: None)
        exchange = Exchange(
            program,
            transfers,
            ranks_of=ranks_of,
            device_of=schedule.device_of,
            sample_dimensions={transfer.value.name: 0 for transfer in transfers},
            device=torch.device("cpu"),
            run_ahead=SimpleNamespace(wait=lambda work, what: None),
        )
        connecting = False
        for step in program.steps:
            for one in step.begins:
                if isinstance(one, Message):
                    exchange.post(one)
                else:
                    found.calls.append((one,))
            for message in step.receives:
                check_received(exchange.receive(message), message, transfers)
            for message in step.releases:
                exchange.release(message)
            for message in step.sends:
                exchange.send(message, own_tensors(message, transfers))
        exchange.end()
    return found


def own_tensors(message: Message, transfers: Sequence[Transfer]) -> list[torch.Tensor]:
    ends = {message.source, message.target}
    return [
        torch.zeros(transfer.value.shape, dtype=getattr(torch, transfer.value.dtype))
        for transfer in transfers
        if {transfer.source, transfer.target} == ends
        and (message.kind is Kind.FORWARD or transfer.value.differentiable)
    ]


def check_received(values: Mapping[str, torch.Tensor], message: Message, transfers: Sequence[Transfer]) -> None:
    expected = [tuple(tensor.shape) for tensor in own_tensors(message, transfers)]
    assert [tuple(tensor.shape) for tensor in values.values()] == expected


def stuck(sequences: Mapping[int, Sequence[Hashable]], members: Mapping[Hashable, set[int]]) -> dict[int, Hashable]:
    """The call at which each stuck rank stays, if every call blocks until all its members make it."""
    at = dict.fromkeys(sequences, 0)
    moves = True
    while moves:
        moves = False
        for rank, sequence in sequences.items():
            if at[rank] < len(sequence):
                one = sequence[at[rank]]
                there = {r for r in members[one] if at[r] < len(sequences[r]) and sequences[r][at[r]] == one}
                if there == members[one]:
                    for member in there:
                        at[member] += 1
                    moves = True
    return {rank: sequence[at[rank]] for rank, sequence in sequences.items() if at[rank] < len(sequence)}


def numbered(calls: Sequence[tuple[Any, ...]]) -> list[Hashable]:
    """Each call with the number of earlier calls of the same pair, or of the same sum."""
    count: Counter[Any] = Counter()
    found = []
    for call in calls:
        key = call[:2]
        found.append((key, count[key]))
        count[key] += 1
    return found


RANKS = {  # number of pipeline devices -> numbers of ranks on each of them
    2: ((1, 1), (2, 2), (1, 3), (3, 1), (2, 1)),
    4: ((1, 1, 1, 1), (2, 2, 2, 2), (1, 2, 2, 1), (3, 1, 2, 1)),
}


def rank_cases() -> Iterator[tuple[Schedule, tuple[int, ...]]]:
    for devices, counts in RANKS.items():
        for name in BY_RULE:
            for options in options_of(name, devices):
                schedule = build_schedule(name, devices=devices, micro_batches=2 * devices, **options)
                for each in counts:
                    if len(set(each)) == 1 or len({pipe for _, pipe in schedule.device_of}) == 1:
                        yield schedule, each


def test_what_ranks_send_is_what_others_post():
    """In equal order, shape and type, for every schedule, its options, skips and numbers of replicas; and it ends."""
    cases = 0
    for schedule, counts in rank_cases():
        transfers = crossing(schedule.stages, skips=True)
        programs = lower(schedule, transfers, sharing(schedule, tied=can_be_tied(schedule)))
        numbers = iter(range(sum(counts)))
        ranks_of = [[next(numbers) for _ in range(count)] for count in counts]
        found: dict[int, Calls] = {}
        for device, ranks in enumerate(ranks_of):
            slices = [slice_of(len(ranks), transfer) for transfer in transfers]
            for rank in ranks:
                found[rank] = calls_of(rank, programs[device], schedule, slices, ranks_of)
        check_calls(found)
        cases += 1
    assert cases > 140


def slice_of(replicas: int, transfer: Transfer) -> Transfer:
    """``transfer`` for a rank that takes its slice of the samples, one of ``replicas``."""
    shape = (SAMPLES // replicas, *transfer.value.shape[1:])
    return replace(transfer, value=replace(transfer.value, shape=shape))


def check_calls(found: Mapping[int, Calls]) -> None:
    def between(rank: int, pair: tuple[int, int]) -> list[tuple[Any, ...]]:
        return [call for call in found[rank].calls if call[:2] == pair]

    pairs = {call[:2] for one in found.values() for call in one.calls if len(call) > 1}
    for source, target in pairs:
        sent, posted = between(source, (source, target)), between(target, (source, target))
        assert sent == posted
        direction = "upward" if source < target else "downward"
        assert {call[2] for call in sent} == {direction}, "a communicator has one direction"
    connections = {rank: one.connections for rank, one in found.items()}
    assert not stuck(connections, {pair: set(pair) for pair in pairs}), "pairs connect in one order"
    assert {pair for one in connections.values() for pair in one} == pairs
    sequences = {rank: numbered(one.calls) for rank, one in found.items()}
    members: defaultdict[Hashable, set[int]] = defaultdict(set)
    for rank, sequence in sequences.items():
        for one in sequence:
            members[one].add(rank)
    assert not stuck(sequences, members)
