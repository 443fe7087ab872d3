"""What a pipeline device holds at each operation of its schedule, counted without times: micro-batches and messages.

Messages are those between neighbouring stages. Receives are posted as ``auto3d.schedule.lowering`` posts them. A sent
message is released when a later message of its receiver proves that the receive is posted, as there, but only messages
that come from the receiver itself count as a proof. So this takes a search a fraction of the time of lowering.
"""

from bisect import bisect_left
from collections import defaultdict, deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import chain

import numpy as np

from auto3d.schedule.lowering import SENT_AT_MOST
from auto3d.schedule.operation import Kind, Operation, Schedule
from auto3d.schedule.shape import Listing, Shape, listed, without_recompute

COUNTS = (
    "in_flight",  # micro-batches, or parts of them, from the forward until the backward, or until its input half
    "recomputed",  # those in flight with recomputed activations
    "deferred",  # from the input half of the backward until the weight half
    "slice_gradients",  # slices of a sequence in flight to whose keys and values later slices have sent gradients
    "gradients",  # 1 once a backward of the iteration has made the gradients of weights
    "older",  # older versions of the weights
    "posted",  # activations whose receive is posted, for later forwards
    "posted_gradients",
    "sent",  # activations that are sent and not released
    "sent_gradients",
)
"""What is counted of each stage of a device."""

_IN_FLIGHT, _RECOMPUTED, _DEFERRED, _SLICE_GRADIENTS, _GRADIENTS, _OLDER, _POSTED, _, _SENT, _ = range(len(COUNTS))
_WITH_GRADIENT = (Kind.BACKWARD, Kind.BACKWARD_INPUT)
_MAKES_GRADIENTS = (Kind.BACKWARD, Kind.BACKWARD_WEIGHT)
Key = tuple[Kind, int, bool, bool, bool]
"""What the temporaries of an operation depend on: its kind and stage, and the three Booleans of a Moment."""


@dataclass(frozen=True, slots=True)
class Moment:
    """An operation of a device, and what the device holds while it runs, without the operation's own messages."""

    operation: Operation
    recomputed: bool  # whether its activations have been recomputed before
    makes_gradients: bool  # whether it is the stage's first backward of the iteration
    summing: bool  # whether sums of gradients are under way
    counts: tuple[int, ...]  # those of COUNTS for each stage of the device, one stage after the other

    @property
    def key(self) -> Key:
        operation = self.operation
        return operation.kind, operation.stage, self.recomputed, self.makes_gradients, self.summing


def stages_of(schedule: Schedule | Shape, device: int) -> tuple[int, ...]:
    """The stages of ``device`` in order, each once, even if it stands on several pipes."""
    return tuple(sorted({stage for (stage, _), home in schedule.device_of.items() if home == device}))


def highest_moments(shape: Shape, device: int) -> tuple[Moment, ...]:
    """The moments of ``device`` that no other moment with the same key reaches or exceeds in every count."""
    listing, skipped = shape.first_periods()
    if not skipped:
        return _highest(listing, device)
    listing_before, _ = shape.first_periods(fewer=1)
    if not shape.grows:  # one period more holds no more
        return _repeated(without_recompute(listing_before), device)
    before = _highest(listing_before, device)
    if any(_keys(listing, each) != _keys(listing_before, each) for each in range(shape.devices)):
        return _highest(shape.listing, device)
    pairs = zip(_highest(listing, device), before, strict=True)
    return tuple(_grown(one, earlier, skipped) for one, earlier in pairs)


@lru_cache(2**14)
def _repeated(listing: Listing, device: int) -> tuple[Moment, ...]:
    return tuple(map(_without_numbers, _highest_of(listing, device)))


def _without_numbers(moment: Moment) -> Moment:
    """``moment`` of any period: the numbers of its micro-batches would be those of the first ones."""
    return replace(moment, operation=moment.operation._replace(micro_batches=()))


def _grown(moment: Moment, before: Moment, times: int) -> Moment:
    """``moment`` after ``times`` more periods; ``before`` is the same moment one period earlier."""
    pairs = zip(moment.counts, before.counts, strict=True)
    counts = tuple(now + times * (now - then) for now, then in pairs)
    return replace(_without_numbers(moment), counts=counts)


def _highest(listing: Listing, device: int) -> tuple[Moment, ...]:
    return _highest_of(without_recompute(listing), device)


@lru_cache(2**14)  # listings are few: shapes of many micro-batches have the same first ones
def _highest_of(listing: Listing, device: int) -> tuple[Moment, ...]:
    return _not_exceeded(_counted(listed(listing), device, _messages(listing).changes(device)))


def _keys(listing: Listing, device: int) -> list[Key]:
    return [one.key for one in _highest(listing, device)]


@lru_cache(8)  # a few: those of a schedule of many micro-batches take megabytes
def _messages(listing: Listing) -> "_Messages":
    return _Messages(listed(listing))


_Counted = tuple[Operation, bool, bool, bool, tuple[int, ...]]
"""The fields of a Moment: most of those that are counted are not the highest."""


def _not_exceeded(moments: Iterable[_Counted]) -> tuple[Moment, ...]:
    groups: defaultdict[Key, dict[tuple[int, ...], Operation]] = defaultdict(dict)
    for operation, recomputed, makes_gradients, summing, counts in moments:
        group = groups[operation.kind, operation.stage, recomputed, makes_gradients, summing]
        if counts not in group:
            group[counts] = operation
    kept: list[Moment] = []
    for key in sorted(groups):
        group = groups[key]
        every = sorted(group, reverse=True)  # a moment comes after those that exceed it
        table, places, highest = np.array(every), np.arange(len(every)), list[int]()
        while len(places):
            highest.append(int(places[0]))
            places = places[(table[places] > table[places[0]]).any(axis=1)]
        kept += [Moment(group[every[place]], *key[2:], every[place]) for place in reversed(highest)]
    return tuple(kept)


def all_moments(schedule: Schedule) -> list[list[Moment]]:
    """Per device, one moment for each of its operations, in order."""
    messages = _Messages(schedule)
    return [
        [Moment(*counted) for counted in _counted(schedule, device, messages.changes(device))]
        for device in range(schedule.devices)
    ]


Change = tuple[int, int, int]
"""(stage, place of a count, change of it)."""


def _counted(
    schedule: Schedule, device: int, changes: Sequence[tuple[Sequence[Change], Sequence[Change]]]
) -> Iterator[_Counted]:
    """The moments of ``device``; ``changes`` has what messages change before and after each of its operations."""
    operations, stages, slices = schedule.operations[device], stages_of(schedule, device), schedule.slices
    first = {stage: len(COUNTS) * number for number, stage in enumerate(stages)}
    held = [0] * (len(COUNTS) * len(stages))
    early: set[tuple[int, int, int]] = set()  # (stage, pipe, micro-batch) recomputed by an R before the backward
    older = _older_versions(schedule, device) if schedule.weight_version else {}
    splits = {operation.stage for operation in operations if operation.kind is Kind.BACKWARD_WEIGHT}
    summing = False
    for index, operation in enumerate(operations):
        kind, stage, count = operation.kind, operation.stage, len(operation.micro_batches)
        here = first[stage]
        before, after = changes[index]
        for user, place, change in before:
            held[first[user] + place] += change
        for user, counts in older.items():
            held[first[user] + _OLDER] = counts[index]
        recomputed = False
        if early and kind in _WITH_GRADIENT:
            recomputed = all((stage, operation.pipe, m) in early for m in operation.micro_batches)
        if kind is Kind.FORWARD:
            held[here + _IN_FLIGHT] += count
        elif kind is Kind.RECOMPUTE:
            held[here + _RECOMPUTED] += count
            early.update((stage, operation.pipe, m) for m in operation.micro_batches)
        elif kind is Kind.SYNC:
            summing = True
        begun, ended = _slice_gradients(operation, slices) if slices > 1 else (0, 0)
        held[here + _SLICE_GRADIENTS] += begun
        makes = kind in _MAKES_GRADIENTS and not held[here + _GRADIENTS]
        yield operation, recomputed, makes, summing, tuple(held)
        if makes:
            held[here + _GRADIENTS] = 1
        if kind in _WITH_GRADIENT:
            held[here + _IN_FLIGHT] -= count
            held[here + _RECOMPUTED] -= count if recomputed else 0
            held[here + _DEFERRED] += count if kind is Kind.BACKWARD_INPUT and stage in splits else 0
        elif kind is Kind.BACKWARD_WEIGHT:
            held[here + _DEFERRED] -= count
        held[here + _SLICE_GRADIENTS] += ended
        for user, place, change in after:
            held[first[user] + place] += change


def _slice_gradients(operation: Operation, slices: int) -> tuple[int, int]:
    """How an operation changes the number of slices that hold gradients of later ones: when it begins, when it ends.

    The backward of the last slice makes the gradient of all keys as one tensor. That of the slice before it adds its
    own to parts of that tensor, which is then free, and makes a tensor for each earlier slice.
    """
    if operation.kind not in _WITH_GRADIENT:
        return 0, 0
    later = slices - 1 - operation.micro_batches[0] % slices
    return (slices, 0) if later == 0 else (0, -2 if later == 1 else -1)


_Route = tuple[int, int, int]
"""What an operation receives and sends, as the number of the message of micro-batch 0, or -1; units of its time."""


class _Messages:
    """The messages between neighbouring stages: when each is posted, received, sent and released.

    Messages have numbers: those of one direction, target stage and pipe follow each other by micro-batch.
    """

    def __init__(self, schedule: Schedule) -> None:
        self._schedule = schedule
        self._last = schedule.stages - 1
        self._pipes = 1 + max(pipe for _, pipe in schedule.device_of)
        every = chain.from_iterable(schedule.operations)
        self._numbers = 1 + max((m for operation in every for m in operation.micro_batches), default=0)
        self._routes: dict[tuple[Kind, int, int], _Route] = {}
        count = 2 * schedule.stages * self._pipes * self._numbers
        self._sender: list[tuple[int, int]] = [(-1, -1)] * count  # device and step that send each message
        devices = range(schedule.devices)
        rows = [[(*self._route(o), o.micro_batches) for o in operations] for operations in schedule.operations]
        totals, steps, ends, ended_at = list(map(len, rows)), [0] * len(rows), [0] * len(rows), [-1] * count
        walked: list[int] = []  # device of each step
        walked_until: list[int] = []  # its end, in units of a forward
        moved = True
        while moved:  # each device goes on while it can, in turns
            moved = False
            for device in devices:
                row, step, total, clock = rows[device], steps[device], totals[device], ends[device]
                begun = step
                while step < total:
                    receives, sends, units, numbers = row[step]
                    begin = clock
                    if receives >= 0:
                        end = 0
                        for m in numbers:
                            end = ended_at[receives + m]
                            if end < 0:
                                break
                            if end > begin:
                                begin = end
                        if end < 0:
                            break
                    clock = begin + units * len(numbers)
                    if sends >= 0:
                        for m in numbers:
                            ended_at[sends + m] = clock
                            self._sender[sends + m] = device, step
                    walked.append(device)
                    walked_until.append(clock)
                    step += 1
                if step > begun:
                    moved = True
                    steps[device], ends[device] = step, clock
        place_of = np.empty(len(walked), dtype=int)
        place_of[np.argsort(walked_until, kind="stable")] = np.arange(len(walked))
        # Per device, the places of its steps in one common order.
        self._places: list[list[int]] = [place_of[np.array(walked, dtype=int) == device].tolist() for device in devices]

    def _route(self, operation: Operation) -> _Route:
        kind, stage, pipe = key = operation.kind, operation.stage, operation.pipe
        if key not in self._routes:
            receives = sends = -1
            if kind is Kind.FORWARD:
                receives = self._first(0, stage, pipe) if stage else -1
                sends = self._first(0, stage + 1, pipe) if stage < self._last else -1
            elif kind in _WITH_GRADIENT:
                receives = self._first(1, stage, pipe) if stage < self._last else -1
                sends = self._first(1, stage - 1, pipe) if stage else -1
            self._routes[key] = receives, sends, 2 if kind is Kind.BACKWARD else 1
        return self._routes[key]

    def _first(self, gradients: int, target: int, pipe: int) -> int:
        """The number of the message of micro-batch 0."""
        return ((gradients * (self._last + 1) + target) * self._pipes + pipe) * self._numbers

    def changes(self, device: int) -> list[tuple[Sequence[Change], Sequence[Change]]]:
        """What messages change before and after each operation of ``device``."""
        schedule, places, senders = self._schedule, self._places, self._sender
        operations, mine = schedule.operations[device], places[device]
        before: list[list[Change]] = [[] for _ in operations]
        after: list[list[Change]] = [[] for _ in operations]
        proved = [0] * schedule.devices  # steps of each peer that have surely ended
        unreleased: dict[int, deque[tuple[int, int, int]]] = {}  # peer -> (its step, stage, gradients) of messages
        for step, operation in enumerate(operations):
            receives, sends, _ = self._routes[operation.kind, operation.stage, operation.pipe]
            stage, numbers = operation.stage, operation.micro_batches
            gradients = int(operation.kind is not Kind.FORWARD)
            if receives >= 0:
                for m in numbers:
                    source, sending = senders[receives + m]
                    if sending >= proved[source]:
                        proved[source] = sending + 1
                    if source == device:  # a local message is held until it is used
                        before[step].append((stage + 1 if gradients else stage - 1, _SENT + gradients, -1))
                        continue
                    posted = bisect_left(mine, places[source][sending])
                    if posted < step:
                        before[posted].append((stage, _POSTED + gradients, 1))
                        before[step].append((stage, _POSTED + gradients, -1))
            peer, added = -1, 0
            if sends >= 0:
                target = stage - 1 if gradients else stage + 1
                peer = schedule.device_of[target, operation.pipe]
                after[step] += [(stage, _SENT + gradients, 1)] * len(numbers)
                added = len(numbers) if peer != device else 0
            for other, kept in unreleased.items():
                most = SENT_AT_MOST - (added if other == peer else 0)
                while kept and (kept[0][0] < proved[other] or len(kept) > most):
                    _, here, of_gradients = kept.popleft()
                    before[step].append((here, _SENT + of_gradients, -1))
            if added:
                posted = bisect_left(places[peer], mine[step])
                unreleased.setdefault(peer, deque()).extend([(posted, stage, gradients)] * added)
        return list(zip(before, after, strict=True))


def _older_versions(schedule: Schedule, device: int) -> dict[int, list[int]]:
    """Stage -> for each operation of ``device``, the number of old versions of its weights that it keeps."""
    operations = schedule.operations[device]
    older = {stage: [0] * len(operations) for stage in stages_of(schedule, device)}
    for (stage, pipe), home in schedule.device_of.items():
        if home != device:
            continue
        mine = [(o.stage, o.pipe) == (stage, pipe) for o in operations]
        last_use: dict[int, int] = {}
        for index, operation in enumerate(operations):
            if mine[index]:
                last_use.update((schedule.weight_version[stage, m], index) for m in operation.micro_batches)
        newest, alive = 0, {0}
        for index, operation in enumerate(operations):
            if mine[index] and operation.kind is Kind.UPDATE:
                newest += 1
                alive.add(newest)
            alive = {version for version in alive if version == newest or last_use.get(version, -1) >= index}
            older[stage][index] += len(alive) - 1
    return older
