"""The bytes that each device holds over time."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class BytesOverTime:
    """A step function: ``held[i]`` bytes from ``times[i]`` until the next time or the end."""

    times: list[float]
    held: list[float]

    @property
    def peak(self) -> float:
        return max(self.held)
