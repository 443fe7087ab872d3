"""Cases that repeat a behaviour of the suite at more sizes, models or schedules: `make soak` runs them.

``soak`` marks them where they are listed; suite.yaml says which cases the suite keeps of its longest tests.
"""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import yaml

_FILE = Path(__file__).with_name("suite.yaml")
_KEPT: dict[str, dict[str, list[str]]] = yaml.safe_load(_FILE.read_text())  # file -> test -> how its cases begin


def soak(*cases: Any) -> list[Any]:
    """``cases`` of a parametrised test, which the suite leaves out; a tuple has the values of several arguments."""
    return [pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=pytest.mark.soak) for case in cases]


def mark_further_cases(items: Iterable[pytest.Item], *, whole_files: bool) -> None:
    """Mark what suite.yaml leaves out; with ``whole_files`` raise UsageError for an entry that fits no case."""
    tests = ((file, name, kept) for file, named in _KEPT.items() for name, kept in named.items())
    idle = {(file, name, begin) for file, name, kept in tests for begin in kept or [""]}
    files = set()
    for item in items:
        file, _, test = item.nodeid.removeprefix("tests/").partition("::")
        name, _, case = test.partition("[")
        files.add(file)
        kept = _KEPT.get(file, {}).get(name)
        if kept is None:
            continue
        fits = [begin for begin in kept if case.startswith(begin)]
        idle -= {(file, name, begin) for begin in fits or [""]}
        if not fits:
            item.add_marker("soak")
    if whole_files and (wrong := sorted(entry for entry in idle if entry[0] in files)):
        raise pytest.UsageError(f"{_FILE.name} names what is not there: {wrong}")
