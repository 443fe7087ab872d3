"""An entry of the table of schedules: name, summary, source, and the function that builds the operations."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from inspect import signature

from auto3d.schedule.operation import Schedule
from auto3d.schedule.order_text import ORDER


@dataclass(frozen=True, kw_only=True)
class Family:
    """One schedule at all sizes and options.

    ``build`` takes ``devices`` and ``micro_batches`` by keyword. Its other keyword arguments, which all have defaults,
    are the options of the family: users set them in recipes and on the command line.
    """

    name: str
    summary: str  # one line
    source: str  # who proposed it: authors, venue and year, section
    ships_in: tuple[str, ...] = ()  # other systems that train with it
    build: Callable[..., Schedule]
    periodic: bool = True  # whether the order repeats itself: see PERIODS in auto3d.schedule.shape

    @cached_property
    def options(self) -> dict[str, int | str]:
        """The name of each option and its default."""
        parameters = signature(self.build).parameters.values()
        return {p.name: p.default for p in parameters if p.name not in ("devices", "micro_batches")}

    @property
    def asynchronous(self) -> bool:
        """Whether iterations overlap: gradients then come from older weights than the weights that they update."""
        return "iterations" in self.options

    @property
    def explicit(self) -> bool:
        """Whether an option lists the operations: such a schedule exists at one size."""
        return ORDER in self.options

    @property
    def sliced(self) -> bool:
        """Whether an option divides micro-batches along their sequence, which only causal models allow."""
        return "slices" in self.options

    @property
    def automatic(self) -> bool:
        """Whether a search tries it without being asked to, under ``auto`` and as a start for a search for orders.

        Asynchronous schedules learn something different, explicit schedules take a search of their own, and sliced
        schedules need a causal model.
        """
        return not (self.asynchronous or self.explicit or self.sliced)
