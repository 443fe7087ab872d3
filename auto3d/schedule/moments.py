"""What a pipeline device holds at each operation of its schedule, counted without times: micro-batches and messages.

Messages go between neighbouring stages; where stage 0 reads for all, it also sends inputs to each of them. Receives
are posted as ``auto3d.schedule.lowering`` posts them. A sent
message is released when a later message of its receiver proves that the receive is posted, as there, but only messages
that come from the receiver itself count as a proof. So this takes a search a fraction of the time of lowering.
"""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import accumulate, chain
from typing import Generic, NamedTuple, TypeVar

import numpy as np

from auto3d.schedule.lowering import SENT_AT_MOST
from auto3d.schedule.operation import Kind, Operation, Schedule
from auto3d.schedule.shape import Listing, Shape, listed, without_recompute

Number = TypeVar("Number")


class Counts(NamedTuple, Generic[Number]):
    """What one stage of a device holds: a number of each kind, or the bytes of each kind."""

    in_flight: Number  # micro-batches, or parts of them, from the forward until the backward, or until its input half
    recomputed: Number  # micro-batches in flight with recomputed activations
    deferred: Number  # from the input half of the backward until the weight half
    slice_gradients: Number  # slices of a sequence in flight to whose keys and values later slices have sent gradients
    gradients: Number  # 1 once a backward of the iteration has made the gradients of weights
    older: Number  # older versions of the weights
    posted: Number  # activations whose receive is posted, for later forwards
    posted_gradients: Number
    sent: Number  # activations that are sent and not released
    sent_gradients: Number
    # Of inputs that stage 0 has read for other stages:
    posted_inputs: Number  # messages whose receive is posted, for later forwards; on stage 0's device, from the read on
    sent_inputs: Number  # micro-batches of stage 0 that are read, with a message to another device not yet released


COLUMN = Counts(*range(len(Counts._fields)))
"""The place of each count among the counts of a stage, in matrices of counts."""

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
    counts: tuple[Counts[int], ...]  # a Counts for each stage of the device, in the order of stages_of

    @property
    def key(self) -> Key:
        operation = self.operation
        return operation.kind, operation.stage, self.recomputed, self.makes_gradients, self.summing


def stages_of(schedule: Schedule | Shape, device: int) -> tuple[int, ...]:
    """The stages of ``device`` in order, each once, even if it stands on several pipes."""
    return tuple(sorted({stage for (stage, _), home in schedule.device_of.items() if home == device}))


def highest_moments(shape: Shape, device: int, *, read_once: bool = False) -> tuple[Moment, ...]:
    """The moments of ``device`` that no other moment with the same key reaches or exceeds in every count.

    If inputs are ``read_once``, stage 0 reads them for all stages.
    """
    listing, skipped = shape.first_periods()
    if not skipped:
        return _highest(listing, device, read_once)
    listing_before, _ = shape.first_periods(fewer=1)
    if not shape.grows:  # one period more holds no more
        return _repeated(without_recompute(listing_before), device, read_once)
    before = _highest(listing_before, device, read_once)
    if any(_keys(listing, home, read_once) != _keys(listing_before, home, read_once) for home in range(shape.devices)):
        return _highest(shape.listing, device, read_once)
    pairs = zip(_highest(listing, device, read_once), before, strict=True)
    return tuple(_grown(moment, earlier, skipped) for moment, earlier in pairs)


@lru_cache(2**14)
def _repeated(listing: Listing, device: int, read_once: bool) -> tuple[Moment, ...]:
    return tuple(map(_without_numbers, _highest_of(listing, device, read_once)))


def _without_numbers(moment: Moment) -> Moment:
    """``moment`` without its micro-batches, whose numbers would be right in the first period alone."""
    return replace(moment, operation=moment.operation._replace(micro_batches=()))


def _grown(moment: Moment, before: Moment, times: int) -> Moment:
    """``moment`` after ``times`` more periods; ``before`` is the same moment one period earlier."""
    counts = tuple(
        Counts(*(now + times * (now - then) for now, then in zip(of_stage, earlier, strict=True)))
        for of_stage, earlier in zip(moment.counts, before.counts, strict=True)
    )
    return replace(_without_numbers(moment), counts=counts)


def _highest(listing: Listing, device: int, read_once: bool) -> tuple[Moment, ...]:
    return _highest_of(without_recompute(listing), device, read_once)


@lru_cache(2**14)  # listings are few: shapes of many micro-batches share their first periods
def _highest_of(listing: Listing, device: int, read_once: bool) -> tuple[Moment, ...]:
    table = _counted(listed(listing), device, _messages(listing, read_once))
    groups: defaultdict[Key, dict[bytes, int]] = defaultdict(dict)  # key -> row of counts -> its first step
    rows = table.counts.astype(">i4")  # big-endian, so that their bytes have the order of the counts: none is negative
    for step, key in enumerate(table.keys):
        groups[key].setdefault(rows[step].tobytes(), step)
    return tuple(table.moment(step) for key in sorted(groups) for step in _not_exceeded(groups[key], table.counts))


def _not_exceeded(group: Mapping[bytes, int], counts: np.ndarray) -> list[int]:
    """The steps of ``group`` whose counts no other step reaches or exceeds in every count, the lowest first."""
    steps = np.array([group[row] for row in sorted(group, reverse=True)])  # a step comes after the steps that exceed it
    highest = list[int]()
    while len(steps):
        highest.append(int(steps[0]))
        steps = steps[1:]
        steps = steps[(counts[steps] > counts[highest[-1]]).any(axis=1)]
    return highest[::-1]


def _keys(listing: Listing, device: int, read_once: bool) -> list[Key]:
    return [moment.key for moment in _highest(listing, device, read_once)]


@lru_cache(8)  # a few: the moments of a schedule of many micro-batches take megabytes
def _messages(listing: Listing, read_once: bool) -> "_Messages":
    return _Messages(listed(listing), read_once=read_once)


def all_moments(schedule: Schedule, *, read_once: bool = False) -> list[list[Moment]]:
    """Per device, one moment for each of its operations, in order."""
    messages = _Messages(schedule, read_once=read_once)
    tables = [_counted(schedule, device, messages) for device in range(schedule.devices)]
    return [list(map(table.moment, range(len(table.keys)))) for table in tables]


@dataclass(frozen=True, slots=True)
class _MomentTable:
    """The moments of one device: a key and a row of counts for each of its operations."""

    operations: Sequence[Operation]
    keys: Sequence[Key]
    counts: np.ndarray  # [operations × counts of all stages, one stage after the other]

    def moment(self, step: int) -> Moment:
        counts = tuple(Counts(*of_stage) for of_stage in self.counts[step].reshape(-1, len(COLUMN)).tolist())
        return Moment(self.operations[step], *self.keys[step][2:], counts)


class _Changes:
    """Changes of the counts of one device, each from a step on. Operation n is step n; what it leaves is step n + 1."""

    def __init__(self, steps: int, stages: Sequence[int]) -> None:
        self._steps, self._width = steps, len(COLUMN) * len(stages)
        self._first = np.zeros(1 + max(stages), dtype=int)  # column of the first count, by stage
        self._first[list(stages)] = len(COLUMN) * np.arange(len(stages))
        self._cells: list[np.ndarray] = []
        self._amounts: list[np.ndarray] = []

    def add(self, steps: np.ndarray, stages: np.ndarray, counts: np.ndarray, amounts: np.ndarray) -> None:
        self._cells.append(steps * self._width + self._first[stages] + counts)
        self._amounts.append(amounts)

    def summed(self) -> np.ndarray:
        """[steps × counts]: what is held at each step."""
        cells, amounts = np.concatenate(self._cells), np.concatenate(self._amounts)
        changed = np.bincount(cells, amounts, (self._steps + 1) * self._width).astype(int)
        return changed.reshape(-1, self._width)[: self._steps].cumsum(axis=0)


def _counted(schedule: Schedule, device: int, messages: "_Messages") -> _MomentTable:
    """The moments of ``device``; ``messages`` has the messages of the whole schedule."""
    operations, stages, slices = schedule.operations[device], stages_of(schedule, device), schedule.slices
    early: set[tuple[int, int, int]] = set()  # (stage, pipe, micro-batch) recomputed by an R before the backward
    splits = {operation.stage for operation in operations if operation.kind is Kind.BACKWARD_WEIGHT}
    made: set[int] = set()  # stages that have gradients
    summing = False
    keys: list[Key] = []
    own: list[tuple[int, int, int, int]] = []  # step, stage, count, amount
    for step, operation in enumerate(operations):
        kind, stage, numbers, pipe = operation
        count, recomputed = len(numbers), False
        if kind is Kind.FORWARD:
            own.append((step, stage, COLUMN.in_flight, count))
        elif kind in _WITH_GRADIENT:
            recomputed = bool(early) and all((stage, pipe, m) in early for m in numbers)
            own.append((step + 1, stage, COLUMN.in_flight, -count))
            if recomputed:
                own.append((step + 1, stage, COLUMN.recomputed, -count))
            if kind is Kind.BACKWARD_INPUT and stage in splits:
                own.append((step + 1, stage, COLUMN.deferred, count))
            if slices > 1:
                begun, ended = _slice_gradients(operation, slices)
                own += [(step, stage, COLUMN.slice_gradients, begun), (step + 1, stage, COLUMN.slice_gradients, ended)]
        elif kind is Kind.BACKWARD_WEIGHT:
            own.append((step + 1, stage, COLUMN.deferred, -count))
        elif kind is Kind.RECOMPUTE:
            own.append((step, stage, COLUMN.recomputed, count))
            early.update((stage, pipe, m) for m in numbers)
        elif kind is Kind.SYNC:
            summing = True
        makes = kind in _MAKES_GRADIENTS and stage not in made
        if makes:
            made.add(stage)
            own.append((step + 1, stage, COLUMN.gradients, 1))
        keys.append((kind, stage, recomputed, makes, summing))
    changes = _Changes(len(operations), stages)
    changes.add(*np.array(own, dtype=int).reshape(-1, 4).T)
    changes.add(*messages.changes(device))
    counts = changes.summed()
    if schedule.weight_version:
        for stage, older in _older_versions(schedule, device).items():
            counts[:, len(COLUMN) * stages.index(stage) + COLUMN.older] = older
    return _MomentTable(operations, keys, counts)


def _slice_gradients(operation: Operation, slices: int) -> tuple[int, int]:
    """How an operation changes the number of slices that hold gradients of later slices: when it begins, when it ends.

    The backward of the last slice makes the gradient of all keys as one tensor. The backward of the slice before it
    adds its own gradient to parts of that tensor, which is then free, and makes a tensor for each earlier slice.
    """
    if operation.kind not in _WITH_GRADIENT:
        return 0, 0
    later = slices - 1 - operation.micro_batches[0] % slices
    return (slices, 0) if later == 0 else (0, -2 if later == 1 else -1)


class _Messages:
    """The messages between stages: when each message is posted, received, sent and released.

    Messages have numbers: messages of one direction, target stage and pipe follow each other by micro-batch. The steps
    of all devices are numbered in a row; one more number behind the steps of each device stands for its end.
    """

    def __init__(self, schedule: Schedule, *, read_once: bool) -> None:
        self._stages, self._read_once = schedule.stages, read_once
        self._pipes = 1 + max(pipe for _, pipe in schedule.device_of)
        operations = [*chain.from_iterable(schedule.operations)]
        sizes = np.fromiter((len(operation.micro_batches) for operation in operations), dtype=int)
        micro_batches = np.fromiter(chain.from_iterable([o.micro_batches for o in operations]), dtype=int)
        self._micro_batches = 1 + int(micro_batches.max(initial=0))
        lengths = np.array([*map(len, schedule.operations)])
        self._bounds = np.array([0, *np.cumsum(lengths + 1)])
        steps = np.arange(len(operations)) + np.repeat(np.arange(len(lengths)), lengths)
        kinds: dict[tuple[Kind, int, int], int] = {}
        kind_of = [kinds.setdefault((kind, stage, pipe), len(kinds)) for kind, stage, _, pipe in operations]
        *messages, units = np.array([self._route(*key) for key in kinds]).T[:, kind_of]
        firsts = [np.repeat(column, sizes) for column in messages]
        received, sent = (np.where(first >= 0, first + micro_batches, -1) for first in firsts)
        places = _places(lengths.tolist(), sizes, units * sizes, received, sent)
        ordered = (_by_number(column, np.repeat(steps, sizes)) for column in (received, sent))
        self._changes = self._find_changes(len(lengths), places, *ordered)
        self._first = np.searchsorted(self._changes[0], self._bounds)

    def _route(self, kind: Kind, stage: int, pipe: int) -> tuple[int, int, int]:
        """What an operation receives and sends, as the number of the message of micro-batch 0, or -1; and the units of
        its time for each micro-batch."""
        receives = sends = -1
        last = self._stages - 1
        if kind is Kind.FORWARD:
            receives = self._number(0, stage, pipe) if stage else -1
            sends = self._number(0, stage + 1, pipe) if stage < last else -1
        elif kind in _WITH_GRADIENT:
            receives = self._number(1, stage, pipe) if stage < last else -1
            sends = self._number(1, stage - 1, pipe) if stage else -1
        return receives, sends, 2 if kind is Kind.BACKWARD else 1

    def _number(self, gradient: int, target: int, pipe: int) -> int:
        """The number of the message of micro-batch 0."""
        return ((gradient * self._stages + target) * self._pipes + pipe) * self._micro_batches

    def _find_changes(
        self, devices: int, places: np.ndarray, received: np.ndarray, sent: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        """Steps, stages, counts and amounts of all changes, in the order of steps.

        ``places`` has the place of each step in one common order, ``received`` and ``sent`` each message's number and
        step in the order of numbers.
        """
        numbers, source, target = sent[:, 0], sent[:, 1], received[:, 1]
        assert np.array_equal(numbers, received[:, 0]), "a message is not received"
        numbers //= self._pipes * self._micro_batches
        gradient, stage = np.divmod(numbers, self._stages)
        sender = np.where(gradient, stage + 1, stage - 1)
        device = np.repeat(np.arange(devices), np.diff(self._bounds))
        # A receive is posted before the first step that ends after the message was sent.
        many = len(places) + 1
        posted = np.searchsorted(device * many + places, device[target] * many + places[source])
        local = device[source] == device[target]  # such a message is held until it is used
        waits = ~local & (posted < target)
        proofs = source[~local], target[~local]
        released = self._released(devices, device, *proofs, posted[~local], proofs)
        as_sent = np.where(gradient, COLUMN.sent_gradients, COLUMN.sent)
        as_posted = np.where(gradient, COLUMN.posted_gradients, COLUMN.posted)[waits]
        changes = [
            (source + 1, sender, as_sent, 1),
            (target[local], sender[local], as_sent[local], -1),
            (released, sender[~local], as_sent[~local], -1),
            (posted[waits], stage[waits], as_posted, 1),
            (target[waits], stage[waits], as_posted, -1),
        ]
        if self._read_once and self._stages > 1:
            changes += self._of_inputs(devices, device, places, gradient, stage, source, target)
        steps, stages, counts = (np.concatenate([change[place] for change in changes]) for place in range(3))
        amounts = np.repeat([change[3] for change in changes], [len(change[0]) for change in changes])
        order = np.argsort(steps)
        return steps[order], stages[order], counts[order], amounts[order]

    def _of_inputs(
        self,
        devices: int,
        device: np.ndarray,
        places: np.ndarray,
        gradient: np.ndarray,
        stage: np.ndarray,
        source: np.ndarray,
        target: np.ndarray,
    ) -> Iterator[tuple[np.ndarray, np.ndarray, np.ndarray, int]]:
        """The changes by messages of inputs, which each forward of stage 0 sends to all other stages.

        The arrays are as in ``_find_changes``; ``stage`` has the receiver of each message. Stage 0 holds what it has
        read until the last of the messages to other devices is released, and until stages of its own device use it.
        """

        def steps(back: int, to: int, of: np.ndarray) -> np.ndarray:
            return of[(gradient == back) & (stage == to)]

        many, first, remote = len(places) + 1, steps(0, 1, source), device[source] != device[target]
        over = first
        for reader in range(1, self._stages):
            used = steps(0, reader, target)
            if device[used[0]] == device[first[0]]:
                numbers, count = np.full(len(used), reader), np.full(len(used), COLUMN.posted_inputs)
                yield first, numbers, count, 1
                yield used, numbers, count, -1
                continue
            posted = np.searchsorted(device * many + places, device[used] * many + places[first])
            # The gradient of a micro-batch also goes back to stage 0 through other devices.
            left, came = steps(1, reader - 1, source), steps(1, 0, target)
            proofs = np.append(source[remote], left), np.append(target[remote], came)
            over = np.maximum(over, self._released(devices, device, first, used, posted, proofs))
            waits = posted < used
            numbers, count = np.full(waits.sum(), reader), np.full(waits.sum(), COLUMN.posted_inputs)
            yield posted[waits], numbers, count, 1
            yield used[waits], numbers, count, -1
        zero, count = np.zeros(len(first), dtype=int), np.full(len(first), COLUMN.sent_inputs)
        yield first, zero, count, 1
        yield over, zero, count, -1

    def _released(
        self,
        devices: int,
        device: np.ndarray,
        source: np.ndarray,
        target: np.ndarray,
        posted: np.ndarray,
        proofs: tuple[np.ndarray, np.ndarray],
    ) -> np.ndarray:
        """The step before which each message to another device is released by its sender.

        Messages of a pair of devices are released in the order in which they are sent: once a message back, whose step
        and whose use ``proofs`` has, proves that the receive is ``posted``, or before the sender keeps more than
        SENT_AT_MOST of them.
        """
        many = len(device) + 1
        pair, (left, came) = device[source] * devices + device[target], proofs
        back = device[came] * devices + device[left]
        told = np.argsort(back * many + came)
        proved = np.maximum.accumulate(back[told] * many + left[told])
        first_proof = np.searchsorted(proved, pair * many + posted)
        end = proof = self._bounds[device[source] + 1] - 1
        if len(told):
            at = told[np.minimum(first_proof, len(told) - 1)]
            proof = np.where((first_proof < len(told)) & (back[at] == pair), came[at], end)
        order = np.argsort(pair * many + source, kind="stable")
        pair, source, proof, end = pair[order], source[order], proof[order], end[order]
        full = end.copy()
        same = pair[SENT_AT_MOST:] == pair[:-SENT_AT_MOST]
        full[:-SENT_AT_MOST][same] = source[SENT_AT_MOST:][same]
        release = np.maximum(np.minimum(proof, full), source + 1)
        released = np.empty_like(release)
        released[order] = np.maximum.accumulate(pair * many + release) - pair * many
        return released

    def changes(self, device: int) -> tuple[np.ndarray, ...]:
        """Steps, stages, counts and amounts of what messages change on ``device``."""
        steps, *rest = (column[self._first[device] : self._first[device + 1]] for column in self._changes)
        return steps - self._bounds[device], *rest


def _by_number(numbers: np.ndarray, steps: np.ndarray) -> np.ndarray:
    """[messages × 2]: the number and the step of each message, in the order of numbers; -1 is none."""
    messages = np.stack((numbers, steps), axis=1)[numbers >= 0]
    return messages[np.argsort(messages[:, 0])]


def _places(
    lengths: Sequence[int], sizes: np.ndarray, units: np.ndarray, received: np.ndarray, sent: np.ndarray
) -> np.ndarray:
    """Per step of all devices, its place in the order in which steps end; an end of a device is after all of them.

    ``lengths`` has the operations of each device; ``sizes`` and ``units`` have the micro-batches and the time of each
    operation; ``received`` and ``sent`` the number of the message of each micro-batch of each operation, or -1.
    """
    ends = np.cumsum(sizes)
    first, until, takes = (ends - sizes).tolist(), ends.tolist(), units.tolist()
    needs, gives = received.tolist(), sent.tolist()
    stops = [*accumulate(lengths)]
    steps, clocks = [stop - length for stop, length in zip(stops, lengths, strict=True)], [0] * len(lengths)
    ended_at = [-1] * (2 + max(max(needs, default=0), max(gives, default=0)))
    ended_at[-1] = 0  # an operation without a message has the number -1, and waits for nothing
    walked: list[int] = []  # operations
    walked_until: list[int] = []  # their ends, in units of a forward
    moved = True
    while moved:  # each device goes on while it can, in turns
        moved = False
        for device, stop in enumerate(stops):
            step, clock = steps[device], clocks[device]
            begun = step
            while step < stop:
                begin = clock
                for number in needs[first[step] : until[step]]:
                    end = ended_at[number]
                    if end < 0:
                        break
                    if end > begin:
                        begin = end
                else:
                    clock = begin + takes[step]
                    for number in gives[first[step] : until[step]]:
                        if number >= 0:
                            ended_at[number] = clock
                    walked.append(step)
                    walked_until.append(clock)
                    step += 1
                    continue
                break
            if step > begun:
                moved = True
                steps[device], clocks[device] = step, clock
    place_of = np.full(len(sizes), len(walked))
    place_of[np.array(walked, dtype=int)[np.argsort(walked_until, kind="stable")]] = np.arange(len(walked))
    return np.insert(place_of, stops, len(walked))


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
