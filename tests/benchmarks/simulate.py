"""Speed and memory of the simulator, and the time to load an order: python -m tests.benchmarks.simulate

1F1B of 32 devices and 8,000 micro-batches, its dependencies included, in processor time.
"""

import time
import tracemalloc
from collections.abc import Callable
from statistics import median

from auto3d.schedule import build_schedule
from auto3d.schedule.order_text import order_options
from auto3d.simulate.costs import uniform
from auto3d.simulate.critical_path import critical_path
from auto3d.simulate.idle import bubble_ratio
from auto3d.simulate.simulate import simulate
from launch.report.release import Target
from tests.targets import end

REPETITIONS = 7
CASES = {
    "no messages": {},
    "messages and syncs beside compute": {"p2p": 0.1, "sync": 1.0},
    "messages that occupy both ends": {"p2p": 0.1, "overlap": False},
}


def seconds(work: Callable[[], object]) -> list[float]:
    """Processor seconds of each repetition, so that other processes on the machine do not count."""
    found = []
    for _ in range(REPETITIONS):
        begin = time.process_time()
        work()
        found.append(time.process_time() - begin)
    return found


def main() -> None:
    schedule = build_schedule("1f1b", devices=32, micro_batches=8000)
    operations = sum(map(len, schedule.operations))
    print(f"1f1b, 32 devices, 8000 micro-batches: {operations} operations; simulate(), dependencies included")
    targets = []
    for name, times in CASES.items():
        costs = uniform(schedule, **times)
        found = seconds(lambda costs=costs: simulate(schedule, costs))
        print(
            f"  {name}: {operations / median(found):,.0f} operations/s "
            f"(median of {REPETITIONS}; {operations / max(found):,.0f} to {operations / min(found):,.0f})"
        )
        speed = operations / median(found) / 1e6
        targets.append(
            Target(what=f"simulated, {name}", found=speed, wish=0.8, unit=" million operations/s", least=True)
        )
    timeline = simulate(schedule, uniform(schedule))
    for figure in (bubble_ratio, critical_path):
        print(f"  {figure.__name__} of it: {median(seconds(lambda figure=figure: figure(timeline))):.2f} s")
    options = order_options(build_schedule("zb-v", devices=16, micro_batches=128))
    load = seconds(lambda: build_schedule("synthesized", devices=16, micro_batches=128, **options))
    print(f"Loading the order of zb-v, 16 devices, 128 micro-batches, from its text: {median(load):.2f} s")
    print("Memory of a timeline beyond its schedule:")
    for micro_batches in (500, 1000, 2000, 4000):
        schedule = build_schedule("1f1b", devices=32, micro_batches=micro_batches)
        costs = uniform(schedule, p2p=0.1)
        tracemalloc.start()
        timeline = simulate(schedule, costs)
        held, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        count = len(timeline.operations)
        print(f"  {count} operations: {held / count:.0f} bytes per operation, {peak / count:.0f} at the peak")
    targets.append(Target(what="memory of a timeline", found=held / count, wish=240, unit=" bytes per operation"))
    end(targets)


if __name__ == "__main__":
    main()
