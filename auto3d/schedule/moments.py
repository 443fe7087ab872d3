"""What a pipeline device holds at each operation of its schedule, counted without times: micro-batches and messages.

Messages are those between neighbouring stages. Receives are posted as ``auto3d.schedule.lowering`` posts them. A sent
message is released when a later message of its receiver proves that the receive is posted, as there, but only messages
that come from the receiver itself count as a proof. So this takes a search a fraction of the time of lowering.
"""

from bisect import bisect_left
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np

from auto3d.schedule.advance import advance_devices
from auto3d.schedule.lowering import SENT_AT_MOST
from auto3d.schedule.operation import Kind, Operation, Schedule
from auto3d.schedule.shape import Listing, Shape, listed

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
    before = _highest(listing_before, device)
    if not shape.grows:  # one period more holds no more
        return tuple(map(_without_numbers, before))
    if any(_keys(listing, each) != _keys(listing_before, each) for each in range(shape.devices)):
        return _highest(shape.listing, device)
    pairs = zip(_highest(listing, device), before, strict=True)
    return tuple(_grown(one, earlier, skipped) for one, earlier in pairs)


def _without_numbers(moment: Moment) -> Moment:
    """``moment`` of any period: the numbers of its micro-batches would be those of the first ones."""
    return replace(moment, operation=moment.operation._replace(micro_batches=()))


def _grown(moment: Moment, before: Moment, times: int) -> Moment:
    """``moment`` after ``times`` more periods; ``before`` is the same moment one period earlier."""
    pairs = zip(moment.counts, before.counts, strict=True)
    counts = tuple(now + times * (now - then) for now, then in pairs)
    return replace(_without_numbers(moment), counts=counts)


@lru_cache(2**14)  # listings are few: shapes of many micro-batches have the same first ones
def _highest(listing: Listing, device: int) -> tuple[Moment, ...]:
    return _not_exceeded(_moments(listed(listing), device, _messages(listing).changes(device)))


def _keys(listing: Listing, device: int) -> list[Key]:
    return [one.key for one in _highest(listing, device)]


@lru_cache(4)  # a few: those of a schedule of many micro-batches take megabytes
def _messages(listing: Listing) -> "_Messages":
    return _Messages(listed(listing))


def _not_exceeded(moments: Iterable[Moment]) -> tuple[Moment, ...]:
    groups: dict[Key, dict[tuple[int, ...], Moment]] = {}
    for moment in moments:
        groups.setdefault(moment.key, {}).setdefault(moment.counts, moment)
    kept: list[Moment] = []
    for key in sorted(groups):
        every = sorted(groups[key], reverse=True)  # a moment comes after those that exceed it
        table, places, highest = np.array(every), np.arange(len(every)), list[int]()
        while len(places):
            highest.append(int(places[0]))
            places = places[(table[places] > table[places[0]]).any(axis=1)]
        kept += [groups[key][every[place]] for place in reversed(highest)]
    return tuple(kept)


def all_moments(schedule: Schedule) -> list[list[Moment]]:
    """Per device, one moment for each of its operations, in order."""
    messages = _Messages(schedule)
    return [list(_moments(schedule, device, messages.changes(device))) for device in range(schedule.devices)]


Change = tuple[int, int, int]
"""(stage, place of a count, change of it)."""


def _moments(
    schedule: Schedule, device: int, changes: Sequence[tuple[Sequence[Change], Sequence[Change]]]
) -> Iterator[Moment]:
    """The moments of ``device``; ``changes`` has what messages change before and after each of its operations."""
    operations, stages = schedule.operations[device], stages_of(schedule, device)
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
        begun, ended = _slice_gradients(operation, schedule.slices)
        held[here + _SLICE_GRADIENTS] += begun
        makes = kind in _MAKES_GRADIENTS and not held[here + _GRADIENTS]
        yield Moment(operation, recomputed, makes, summing, tuple(held))
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
    if slices == 1 or operation.kind not in _WITH_GRADIENT:
        return 0, 0
    later = slices - 1 - operation.micro_batches[0] % slices
    return (slices, 0) if later == 0 else (0, -2 if later == 1 else -1)


class _Messages:
    """The messages between neighbouring stages: when each is posted, received, sent and released."""

    def __init__(self, schedule: Schedule) -> None:
        self._schedule = schedule
        self._sender: dict[tuple[bool, int, int, int], tuple[int, int]] = {}
        """(whether it has gradients, target stage, micro-batch, pipe) -> device and step that send it."""
        self._sent: list[list[list[tuple[bool, int, int, int]]]] = [[] for _ in schedule.operations]
        self._received: list[list[list[tuple[bool, int, int, int]]]] = [[] for _ in schedule.operations]
        ends = [0] * schedule.devices
        ended_at: dict[tuple[bool, int, int, int], int] = {}
        walked: list[tuple[int, int]] = []  # (end, device) of each step, in units of a forward
        last = schedule.stages - 1

        def run_next(device: int, index: int) -> bool:
            operation = schedule.operations[device][index]
            kind, stage, pipe, numbers = operation.kind, operation.stage, operation.pipe, operation.micro_batches
            received: list[tuple[bool, int, int, int]] = []
            sent: list[tuple[bool, int, int, int]] = []
            if kind is Kind.FORWARD:
                received = [(False, stage, m, pipe) for m in numbers] if stage else []
                sent = [(False, stage + 1, m, pipe) for m in numbers] if stage < last else []
            elif kind in _WITH_GRADIENT:
                received = [(True, stage, m, pipe) for m in numbers] if stage < last else []
                sent = [(True, stage - 1, m, pipe) for m in numbers] if stage else []
            begin = ends[device]
            for message in received:
                if message not in ended_at:
                    return False
                begin = max(begin, ended_at[message])
            ends[device] = begin + (2 if kind is Kind.BACKWARD else 1) * len(numbers)
            walked.append((ends[device], device))
            for message in sent:
                ended_at[message] = ends[device]
                self._sender[message] = device, index
            self._sent[device].append(sent)
            self._received[device].append(received)
            return True

        totals = [len(operations) for operations in schedule.operations]
        advance_devices([0] * schedule.devices, totals, run_next)
        self._places: list[list[int]] = [[] for _ in range(schedule.devices)]  # steps in one common order
        for place, number in enumerate(sorted(range(len(walked)), key=lambda number: walked[number][0])):
            self._places[walked[number][1]].append(place)

    def changes(self, device: int) -> list[tuple[list[Change], list[Change]]]:
        """What messages change before and after each operation of ``device``."""
        schedule, places = self._schedule, self._places
        count = len(schedule.operations[device])
        found: list[tuple[list[Change], list[Change]]] = [([], []) for _ in range(count)]
        for step, messages in enumerate(self._received[device]):
            for message in messages:
                gradients, stage, _, _ = message
                source, sending = self._sender[message]
                if source == device:  # a local message is held until it is used
                    found[step][0].append((stage + 1 if gradients else stage - 1, _SENT + gradients, -1))
                    continue
                posted = bisect_left(places[device], places[source][sending])
                if posted < step:
                    found[posted][0].append((stage, _POSTED + gradients, 1))
                    found[step][0].append((stage, _POSTED + gradients, -1))
        proved = [0] * schedule.devices  # steps of each peer that have surely ended
        unreleased: dict[int, deque[tuple[int, int, bool]]] = {}  # peer -> (its step, stage, gradients) of messages
        for step in range(count):
            for message in self._received[device][step]:
                source, sending = self._sender[message]
                proved[source] = max(proved[source], sending + 1)
            sending_now = []
            for message in self._sent[device][step]:
                gradients, stage, _, pipe = message
                here = stage + 1 if gradients else stage - 1
                found[step][1].append((here, _SENT + gradients, 1))
                peer = schedule.device_of[stage, pipe]
                if peer != device:
                    posted = bisect_left(places[peer], places[device][step])
                    sending_now.append((peer, posted, here, gradients))
            for peer, kept in unreleased.items():
                added = sum(one[0] == peer for one in sending_now)
                while kept and (kept[0][0] < proved[peer] or len(kept) + added > SENT_AT_MOST):
                    _, here, gradients = kept.popleft()
                    found[step][0].append((here, _SENT + gradients, -1))
            for peer, posted, here, gradients in sending_now:
                unreleased.setdefault(peer, deque()).append((posted, here, gradients))
        return found


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
