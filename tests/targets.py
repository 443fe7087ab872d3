"""Targets of benchmarks: the wish, and the bound that is held; where that is missed, the exit code is 1.

`make release` keeps the figures: it names a file in AUTO3D_FIGURES, to which they are added.
"""

import json
import os
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path


@dataclass(frozen=True, kw_only=True)
class Target:
    """A figure beside the wish for it. ``held`` is a looser bound, where the wish is known to be out of reach today."""

    what: str
    found: float
    wish: float
    held: float | None = None
    unit: str = ""
    least: bool = False  # the figure should be no less than that; else no more

    @property
    def bound(self) -> float:
        return self.wish if self.held is None else self.held

    def _reaches(self, bound: float) -> bool:
        return self.found >= bound if self.least else self.found <= bound

    @property
    def missed(self) -> bool:
        """Whether even what is held is missed."""
        return not self._reaches(self.bound)

    def __str__(self) -> str:
        sign = "at least" if self.least else "at most"
        text = f"{self.what}: {self.found:,.4g}{self.unit}; wished: {sign} {self.wish:,.4g}{self.unit}"
        if self.held is not None and not self._reaches(self.wish):
            text += f", missed; held: {sign} {self.held:,.4g}{self.unit}"
        return f"{text}, {'MISSED' if self.missed else 'kept'}"


def end(targets: Sequence[Target]) -> None:
    """Print all of ``targets``, and end the process with exit code 1 if one that is held is missed."""
    print("\n".join(map(str, targets)))
    if file := os.environ.get("AUTO3D_FIGURES"):
        figures = [{name: value for name, value in asdict(target).items() if name != "held"} for target in targets]
        with Path(file).open("a") as stream:
            stream.writelines(json.dumps(figure) + "\n" for figure in figures)
    if any(target.missed for target in targets):
        sys.exit(1)
