"""The rules of the simulator, written one by one without regard to speed; tests compare the two.

When all-reduces slow what runs beside them, the times of operations follow from those of all-reduces and these from
those. The reference begins without all-reduces, and computes one from the other until nothing changes: an all-reduce
changes only what comes after its begin, so each round settles at least the first one that is not settled yet.
"""

from functools import cache

from auto3d.schedule.operation import Kind, Schedule
from auto3d.simulate.costs import Costs

Place = tuple[int, int]  # device, and index in its list
Times = dict[Place, tuple[float, float]]  # start and end of each operation
Sums = list[list[tuple[float, float]]]  # per device, begin and end of its all-reduces


def reference_times(schedule: Schedule, costs: Costs) -> Times:
    """(device, index) -> start and end of the operation."""
    sums: Sums = [[] for _ in range(schedule.devices)]
    for _ in range(1 + sum(o.kind is Kind.SYNC for row in schedule.operations for o in row)):
        times, found = _times_beside(sums, schedule, costs)
        if not any(costs.sync_slowdown) or _close(sums, found):
            return times
        sums = found
    raise AssertionError("the times of all-reduces do not settle")


def _close(some: Sums, others: Sums) -> bool:
    return all(
        len(one) == len(other)
        and all(abs(a - b) < 1e-11 for x, y in zip(one, other, strict=True) for a, b in zip(x, y, strict=True))
        for one, other in zip(some, others, strict=True)
    )


def _times_beside(sums: Sums, schedule: Schedule, costs: Costs) -> tuple[Times, Sums]:
    """The times of operations that run beside ``sums``, and the all-reduces that follow from these times."""
    places = [
        (device, index) for device, operations in enumerate(schedule.operations) for index in range(len(operations))
    ]

    def at(place: Place):
        return schedule.operations[place[0]][place[1]]

    def makers(kinds: str, stage: int, micro_batches: tuple[int, ...]) -> list[Place]:
        """The operations of one of ``kinds`` on ``stage`` that share a micro-batch with these."""
        return [
            p for p in by_stage.get(stage, []) if at(p).kind in kinds and set(at(p).micro_batches) & set(micro_batches)
        ]

    by_stage: dict[int, list[Place]] = {}
    for place in places:
        by_stage.setdefault(at(place).stage, []).append(place)

    def round_of(place: Place) -> int:
        before = schedule.operations[place[0]][: place[1]]
        return sum(o == at(place) for o in before)

    def inputs(place: Place) -> list[Place]:
        """The operations of other stages whose results this one uses."""
        operation = at(place)
        if operation.kind == "F":
            return makers("F", operation.stage - 1, operation.micro_batches)
        if operation.kind in "BI":
            return makers("BI", operation.stage + 1, operation.micro_batches)
        return []

    def inputs_of_stage(place: Place) -> list[Place]:
        """The operations of the same stage whose results this one uses."""
        operation = at(place)
        kinds = {"B": "F", "I": "F", "R": "F", "W": "I"}.get(operation.kind)
        return makers(kinds, operation.stage, operation.micro_batches) if kinds else []

    def duration(place: Place) -> float:
        operation = at(place)
        stage, speed = operation.stage, costs.speed[place[0]]
        if operation.kind == "S":
            replaced = any(p[0] == place[0] and p[1] > place[1] for p in members(place))
            return costs.sync_start[place[0]] if costs.sync_start and costs.sync[stage] and not replaced else 0.0
        if operation.kind == "U":
            return costs.update[stage] / speed
        of_slice = {"F": costs.forward_of_slice, "B": costs.backward_of_slice}.get(operation.kind)
        equal = costs.times_of(operation.kind)[stage]
        time = sum(
            of_slice[stage][m % schedule.slices] * schedule.slices if of_slice else equal
            for m in operation.micro_batches
        )
        if operation.kind in "BI" and stage in schedule.recompute:
            done = [m for p in makers("R", stage, operation.micro_batches) for m in at(p).micro_batches]
            time += costs.recompute[stage] * sum(m not in done for m in operation.micro_batches)
        return time / schedule.parts / speed

    def receiver(place: Place) -> int | None:
        operation = at(place)
        step = {"F": 1, "B": -1, "I": -1}.get(operation.kind)
        device = schedule.device_of.get((operation.stage + step, operation.pipe)) if step else None
        return None if device == place[0] else device

    def message(place: Place) -> float:
        if receiver(place) is None:
            return 0.0
        operation = at(place)
        forward = operation.kind is Kind.FORWARD
        link = costs.messages[operation.stage if forward else operation.stage - 1]
        each = link.latency + (link.forward if forward else link.backward) / schedule.parts
        return len(operation.micro_batches) * each

    def readers(place: Place, stage: int) -> list[Place]:
        """The forwards of stage 0 which send this operation inputs from another device, if it is one of ``stage``."""
        if at(place).kind != "F" or not costs.inputs or not costs.inputs[stage] or at(place).stage != stage:
            return []
        return [p for p in makers("F", 0, at(place).micro_batches) if p[0] != place[0]]

    def input_messages(place: Place) -> list[tuple[int, float]]:
        """(device, time) of the messages of inputs that a forward of stage 0 sends, in order."""
        operation = at(place)
        if operation.kind != "F" or operation.stage != 0:
            return []
        targets = [(schedule.device_of[stage, operation.pipe], time) for stage, time in enumerate(costs.inputs)]
        return [(to, time * len(operation.micro_batches)) for to, time in targets if time and to != place[0]]

    @cache
    def free(place: Place) -> float:
        """When the device is free for the next operation."""
        sent = sum(time for _, time in input_messages(place))
        return end(place) + (0.0 if costs.overlap else message(place) + sent)

    @cache
    def link_free(place: Place, to: int) -> float:
        """When all that the device has sent to device ``to`` until this operation has arrived, if messages overlap."""
        before = link_free((place[0], place[1] - 1), to) if place[1] else 0.0
        if receiver(place) == to and message(place):
            before = arrival(place)
        of_inputs = [inputs_arrival(place, n) for n, (device, _) in enumerate(input_messages(place)) if device == to]
        return max([before, *of_inputs])

    @cache
    def inputs_arrival(place: Place, number: int) -> float:
        """When the message of inputs with this number has arrived, behind all that went before it on its link."""
        messages = input_messages(place)
        to, time = messages[number]
        last = link_free((place[0], place[1] - 1), to) if place[1] else 0.0
        if receiver(place) == to and message(place):
            last = arrival(place)
        earlier = [inputs_arrival(place, n) for n in range(number) if messages[n][0] == to]
        return queued(place, max([last, *earlier]), time)

    def queued(place: Place, last: float, time: float) -> float:
        """When messages of an operation, of ``time`` in all, have arrived on a link that is free at ``last``."""
        count = len(at(place).micro_batches)
        for number in range(count):
            done = end(place) - duration(place) * (count - 1 - number) / count
            last = max(last, done) + time / count
        return last

    @cache
    def arrival(place: Place) -> float:
        """When the last message has arrived, if messages overlap compute.

        Each is behind earlier ones of the same direction, and leaves when its micro-batch is done.
        """
        device, index = place
        if not message(place):
            return end(place)
        to = receiver(place)
        assert to is not None, "it sends a message"
        return queued(place, link_free((device, index - 1), to) if index else 0.0, message(place))

    def first_to_receive(place: Place, source: Place) -> bool:
        device, index = place
        return not any(source in inputs((device, i)) for i in range(index))

    def members(place: Place) -> list[Place]:
        return [p for p in by_stage[at(place).stage] if at(p).kind == "S" and round_of(p) == round_of(place)]

    @cache
    def reduced(place: Place) -> float:
        """When the device has done its part of the all-reduce, after the all-reduces that it started before."""
        device, index = place
        if not costs.sync[at(place).stage] or any(p[0] == device and p[1] > index for p in members(place)):
            return end(place)  # nothing is reduced, or the S of another pipe on this device starts the all-reduce
        before = [reduced((device, i)) for i in range(index) if at((device, i)).kind == "S"]
        return max([end(place), *before]) + costs.sync[at(place).stage]

    @cache
    def all_reduce_end(place: Place) -> float:
        return max(reduced(p) for p in members(place))

    @cache
    def start(place: Place) -> float:
        device, index = place
        times = [0.0] + [end(p) for p in inputs_of_stage(place)]
        if index:
            times.append(free((device, index - 1)))
        if at(place).kind == "U":
            times += [all_reduce_end((device, i)) for i in range(index) if at((device, i)).kind == "S"]
        from_readers = [
            (
                p,
                [
                    stage
                    for stage, time in enumerate(costs.inputs)
                    if time and schedule.device_of[stage, at(p).pipe] != p[0]
                ],
            )
            for p in readers(place, at(place).stage)
        ]
        numbers = [(p, stages.index(at(place).stage)) for p, stages in from_readers]
        if costs.overlap:
            times += [inputs_arrival(*each) for each in numbers]
            return max(times + [arrival(p) for p in inputs(place)])
        messages = [message(p) for p in inputs(place) if p[0] != device and first_to_receive(place, p)]
        messages += [input_messages(p)[number][1] for p, number in numbers]
        for p, number in numbers:  # it is sent behind the message of activations and the earlier ones of inputs
            times.append(end(p) + message(p) + sum(time for _, time in input_messages(p)[:number]))
        return max(times + [end(p) for p in inputs(place)]) + sum(messages)

    @cache
    def end(place: Place) -> float:
        """All changes of speed one by one: the begins and ends of the all-reduces of the device."""
        now, left = start(place), duration(place)
        if at(place).kind == "S":
            return now + left
        factor = 1 + costs.sync_slowdown[place[0]] if costs.sync_slowdown else 1.0
        beside = sums[place[0]]
        for change in sorted({time for interval in beside for time in interval if time > now}):
            slowdown = factor if any(begin <= now < end for begin, end in beside) else 1.0
            if now + left * slowdown <= change:
                return now + left * slowdown
            now, left = change, left - (change - now) / slowdown
        return now + left

    found: Sums = [[] for _ in range(schedule.devices)]
    for place in places:
        time = costs.sync[at(place).stage]
        if at(place).kind == "S" and time:
            found[place[0]].append((all_reduce_end(place) - time, all_reduce_end(place)))
    return {place: (start(place), end(place)) for place in places}, found
