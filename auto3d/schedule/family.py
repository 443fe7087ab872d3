"""A family of schedules: its name, what it is, and how to build its operations."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from inspect import signature

from auto3d.schedule.operation import Schedule


@dataclass(frozen=True, kw_only=True)
class Family:
    """``build(devices=…, micro_batches=…, **options)``; its further keyword arguments are the family's options."""

    name: str
    summary: str  # one line, with its source
    build: Callable[..., Schedule]

    @cached_property
    def options(self) -> dict[str, int | str]:
        """Option -> default."""
        parameters = signature(self.build).parameters.values()
        return {p.name: p.default for p in parameters if p.name not in ("devices", "micro_batches")}

    @property
    def asynchronous(self) -> bool:
        """Whether its iterations overlap: then it trains with gradients of older weights than those it updates."""
        return "iterations" in self.options
