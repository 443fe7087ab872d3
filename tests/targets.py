"""Targets of benchmarks: the wish, and the bound that is held; where that is missed, the exit code is 1.

`make release` keeps the figures: it names a file in AUTO3D_FIGURES, to which they are added.
"""

import json
import os
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import NoReturn

from launch.report.release import Target


def line(target: Target) -> str:
    """What is printed about ``target``."""
    sign = "at least" if target.least else "at most"
    text = f"{target.what}: {target.found:,.4g}{target.unit}; wished: {sign} {target.wish:,.4g}{target.unit}"
    if target.held is not None and not target.reaches(target.wish):
        text += f", missed; held: {sign} {target.held:,.4g}{target.unit}"
    return f"{text}, {'MISSED' if target.missed else 'kept'}"


def end(targets: Sequence[Target]) -> None:
    """Print all of ``targets``, and end the process with exit code 1 if one that is held is missed."""
    print("\n".join(map(line, targets)))
    if file := os.environ.get("AUTO3D_FIGURES"):
        figures = [{name: value for name, value in asdict(target).items() if name != "held"} for target in targets]
        with Path(file).open("a") as stream:
            stream.writelines(json.dumps(figure) + "\n" for figure in figures)
    if any(target.missed for target in targets):
        sys.exit(1)


def nothing_measured(reason: str) -> NoReturn:
    """End the process, because nothing can be measured here; in a release, whose part then has failed."""
    print(f"nothing was measured: {reason}")
    sys.exit(1 if "AUTO3D_FIGURES" in os.environ else 0)
