"""Orders that the real search found for unequal stages and little memory: python -m tests.distributed.found_orders

A search ends by the clock, so tests train under orders that were saved. This command finds them again (two minutes on
two cores) and writes them to tests/distributed/orders/.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from auto3d.schedule import build_schedule
from auto3d.schedule.operation import Schedule
from auto3d.schedule.order_file import order_file, read_order_file
from auto3d.schedule.order_text import NAME
from auto3d.simulate.costs import MessageCost
from auto3d.synthesis.structures import BareProblem, Solution, Structure, solve, structures

FOLDER = Path(__file__).parent / "orders"
MICRO_BATCHES = 8
SECONDS = 4.0
CHUNKS = {"straight": 1, "two-way": 1, "interleaved": 2, "v": 2, "wave": 4}
"""Placement -> stages on each device, on one pipe."""


@dataclass(frozen=True, kw_only=True)
class FoundOrder:
    placement: str
    devices: int
    recompute: bool = False  # whether stages may recompute; memory is then half of what 1F1B needs, else 3/4

    def __str__(self) -> str:
        return f"{self.placement}-{self.devices}" + "-recompute" * self.recompute

    @property
    def file(self) -> Path:
        return FOLDER / f"{self}.json"

    @property
    def stages(self) -> int:
        return CHUNKS[self.placement] * self.devices

    @property
    def problem(self) -> BareProblem:
        """A heavy last stage, others that differ a little, and weight gradients that are faster than the others."""
        forward = (*(1.0 + 0.25 * (stage % 3) for stage in range(self.stages - 1)), 2.5)
        memory = max(1.5, self.devices * (0.5 if self.recompute else 0.75)) * CHUNKS[self.placement]
        return BareProblem(
            devices=self.devices,
            micro_batches=MICRO_BATCHES,
            forward=forward,
            backward_input=forward,
            backward_weight=tuple(0.75 * time for time in forward),
            recompute=forward,
            sync=(0.5,) * self.stages,
            sync_copies=(0.5,) * self.stages,
            update=(0.25,) * self.stages,
            messages=(MessageCost(forward=0.1, backward=0.1),) * (self.stages - 1),
            overlap=True,
            speed=(1.0,) * self.devices,
            activation=(1.0,) * self.stages,
            kept=(0.25,) * self.stages,
            deferred=(0.5,) * self.stages,
            weights=(0.0,) * self.stages,
            memory=(memory,) * self.devices,
            placements=frozenset({self.placement}),
            may_recompute=self.recompute,
        )

    def structure(self) -> Structure:
        """The one with as many stages as the problem, and with the fewest pipes."""
        possible = (each for each in structures(self.problem) if each.problem.stages == self.stages)
        return min(possible, key=lambda each: each.problem.pipes)

    def sought(self) -> Solution:
        return solve([self.structure()], seconds=SECONDS, seed=1)

    @property
    def options(self) -> dict[str, int | str]:
        """The options of the schedule, from the file."""
        return read_order_file(str(self.file)).options

    @property
    def choices(self) -> dict[str, Any]:
        """The choices of a plan under this order, by the names that make_plan gives them."""
        return {"pp": self.devices, "micro_batches": MICRO_BATCHES, "schedule": NAME, "options": self.options}

    def schedule(self) -> Schedule:
        return build_schedule(NAME, devices=self.devices, micro_batches=MICRO_BATCHES, **self.options)


FOUND = [
    FoundOrder(placement=placement, devices=devices, recompute=recompute)
    for placement in CHUNKS
    for devices in (2, 4)
    for recompute in (False, True)
]
BY_NAME = {str(found): found for found in FOUND}


def main() -> None:
    FOLDER.mkdir(exist_ok=True)
    for found in FOUND:
        solution = found.sought()
        made_by = f"python -m tests.distributed.found_orders: makespan {solution.synthesis.makespan:g}"
        found.file.write_text(order_file(solution.synthesis.schedule, made_by=made_by).to_json() + "\n")
        by_rule = "none fits" if solution.by_rule is None else f"{solution.by_rule[0]:g} by {solution.by_rule[1].name}"
        print(f"{found}: {solution.synthesis.makespan:g}; by rule: {by_rule}")


if __name__ == "__main__":
    main()
