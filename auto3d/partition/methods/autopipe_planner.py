"""AutoPipe's planner: contiguous stages for the simulated time of 1F1B (Liu et al., CLUSTER 2022).

It begins at the cut with the smallest largest stage, simulates it, finds the master stage, and moves blocks away from
it: to later stages as far as these stay faster than the master, and to the stages before and after it. Every cut that
this leads to is simulated, and the fastest cut counts. The search is as its authors ship it in Merak: 2D
micro-batches, messages that take no time, and backwards that take three times as long as forwards.

Beside it, the paper slices the first micro-batches of the warm-up; that is a matter of the schedule, and is not in
here. Nor are the memory and the speeds of devices, which the paper takes to be equal.
"""

from collections import deque
from collections.abc import Iterator, Sequence
from functools import cache, lru_cache
from itertools import pairwise

from auto3d.partition.problem import StageProblem
from auto3d.partition.stage import check_enough
from auto3d.plan import StagePlan, stages_between

FORWARD = 0.25  # fraction of a block's time
_STEPS = 2**40  # times are whole fractions of the model's time, so that equal sums are equal

Bounds = tuple[int, ...]  # numbers of the blocks between which stages begin and end


def choose_stages(problem: StageProblem) -> tuple[StagePlan, ...]:
    """The stages that are fastest by the planner's simulation; raises PartitionError where there are too few blocks.

    All stages recompute what the first stage does: the planner knows 1F1B alone.
    """
    before = problem.before[0]
    check_enough(before, problem.stages)
    ends = [0, *(cut for cut, time in enumerate(before[1:], 1) if time > before[cut - 1])]
    ends[-1] = len(before) - 1
    bounds = fastest_bounds(tuple(before[cut] for cut in ends), problem.stages)
    return stages_between([problem.cuts[ends[bound]] for bound in bounds])


@lru_cache(1024)  # a search asks for the same stages under many schedules
def fastest_bounds(before: tuple[float, ...], stages: int) -> Bounds:
    """The bounds of ``stages`` stages of blocks; ``before`` has the seconds before each block, and of all blocks."""
    return AutopipePlanner([round(_STEPS * time / before[-1]) for time in before]).fastest(stages)


class AutopipePlanner:
    """Plans for blocks; ``before`` has the time before each block, and of all blocks, in any unit."""

    def __init__(self, before: Sequence[int]) -> None:
        self.before = before
        self.least = cache(self._least)

    def fastest(self, stages: int) -> Bounds:
        first = self.balanced(len(self.before) - 1, stages)
        waiting, seen, timed = deque([first]), {first}, []
        while waiting:
            bounds = waiting.popleft()
            time, master = self.simulated(bounds)
            timed.append((time, bounds))
            timed += [(self.simulated(lighter)[0], lighter) for lighter in self.lighter_after(bounds, master)]
            for neighbour in self.moved(bounds, master):
                if neighbour not in seen:
                    seen.add(neighbour)
                    waiting.append(neighbour)
        return min(timed, key=lambda timing: timing[0])[1]

    def balanced(self, blocks: int, stages: int) -> Bounds:
        """The smallest largest stage of the first ``blocks``; of several such cuts, the cut with the latest stages."""
        bounds = [blocks]
        for count in range(stages, 0, -1):
            last, limit = bounds[-1], self.least(bounds[-1], count)
            firsts = (first for first in range(count - 1, last) if self._largest(first, last, count) == limit)
            bounds.append(next(firsts))
        return tuple(reversed(bounds))

    def _least(self, blocks: int, stages: int) -> float:
        """The smallest largest stage of the first ``blocks``."""
        if stages == 0:
            return float("inf") if blocks else 0
        return min((self._largest(first, blocks, stages) for first in range(stages - 1, blocks)), default=float("inf"))

    def _largest(self, first: int, last: int, stages: int) -> float:
        """The largest stage if the last of ``stages`` has the blocks ``first`` to ``last`` - 1."""
        return max(self.least(first, stages - 1), self.before[last] - self.before[first])

    def moved(self, bounds: Bounds, master: int) -> Iterator[Bounds]:
        """The cuts with the first block of the ``master`` stage before it, and with its last block after it."""
        if master == 0 or bounds[master + 1] - bounds[master] == 1:
            return
        yield (*self.balanced(bounds[master] + 1, master), *bounds[master + 1 :])
        if master < len(bounds) - 2:
            later = (*self.balanced(bounds[master + 1] - 1, master + 1), *bounds[master + 2 :])
            if self.simulated(later)[1] <= master:
                yield later

    def lighter_after(self, bounds: Bounds, master: int) -> Iterator[Bounds]:
        """Cuts in which stages after the ``master`` take blocks of later stages, while they stay faster than it.

        So that the cool-down does not wait for them: the stages after the master up to any stage should take no longer
        than as many backwards of the master.
        """
        times = [self.before[last] - self.before[first] for first, last in pairwise(bounds)]
        present, backward = list(bounds), round((1 - FORWARD) * times[master])
        stage, gap = master + 1, 0
        while stage < len(times):
            if sum(times[master + 1 : stage + 1]) <= (stage - master) * backward + gap:
                stage += 1
                continue
            for taker in range(master + 1, stage):
                bound = present[taker + 1]
                block = self.before[bound + 1] - self.before[bound]
                if present[taker + 2] - bound > 1 and times[taker] + block < times[master]:
                    break
            else:
                return
            gap += max(0, sum(times[master + 1 : taker + 1]) - (taker - master) * backward - gap)
            present[taker + 1] += 1
            times[taker] += block
            times[taker + 1] -= block
            stage = taker + 1
            if self.simulated(tuple(present))[1] != master:
                return
            yield tuple(present)

    def simulated(self, bounds: Bounds) -> tuple[int, int]:
        """(time of an iteration of 2D micro-batches under 1F1B, the master stage).

        The master is the last of the stages that wait least while forwards and backwards take turns.
        """
        times = [self.before[last] - self.before[first] for first, last in pairwise(bounds)]
        forward = [round(FORWARD * time) for time in times]
        took = {"F": forward, "B": [time - part for time, part in zip(times, forward, strict=True)]}
        stages = len(times)
        orders = [_one_f_one_b(stage, stages) for stage in range(stages)]
        ends: dict[tuple[str, int, int], int] = {}
        free, waits, at = [0] * stages, [0] * stages, [0] * stages
        while any(place < len(order) for place, order in zip(at, orders, strict=True)):
            for stage, order in enumerate(orders):
                warm = stages - stage - 1
                while at[stage] < len(order):
                    kind, number = order[at[stage]]
                    needs = kind, stage - 1 if kind == "F" else stage + 1, number
                    if 0 <= needs[1] < stages and needs not in ends:
                        break
                    start = max(free[stage], ends.get(needs, 0))
                    if warm + 2 <= at[stage] < len(order) - warm:
                        waits[stage] += start - free[stage]
                    free[stage] = ends[kind, stage, number] = start + took[kind][stage]
                    at[stage] += 1
        return max(free), max(stage for stage in range(stages) if waits[stage] == min(waits))


@cache
def _one_f_one_b(stage: int, stages: int) -> tuple[tuple[str, int], ...]:
    """The order of 2D micro-batches on a stage: forwards that fill the pipeline, one of each in turns, the rest."""
    warm, count = stages - stage - 1, 2 * stages
    turns = [(kind, number + warm * (kind == "F")) for number in range(count - warm) for kind in "FB"]
    first, last = [("F", number) for number in range(warm)], [("B", number) for number in range(count - warm, count)]
    return (*first, *turns, *last)
