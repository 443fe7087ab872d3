"""Counts of what commands and trainings cost, beside those that counts.yaml has committed."""

import json
import sys
from pathlib import Path

import yaml

from tests.promises.running import run

COMMITTED: dict[str, dict[str, int]] = yaml.safe_load(Path(__file__).with_name("counts.yaml").read_text())
GROWTH = 1.25
COUNTED = Path(__file__).with_name("counted.py")


def check(subject: str, found: dict[str, int]) -> None:
    """Raise AssertionError if a count of ``found`` has grown by a quarter, or is not among those of ``subject``."""
    committed = COMMITTED[subject]
    grown = {
        name: (committed.get(name), count) for name, count in found.items() if count > GROWTH * committed.get(name, 0)
    }
    assert not grown, f"{subject}: {grown} (committed, found); what made them grow? counts.yaml says how to raise one"
    assert committed.keys() == found.keys()


def counted(command: str, folder: Path, cache: Path, *, needs_torch: bool) -> tuple[dict[str, int], str]:
    """The counts of `auto3d COMMAND` in ``folder``, and what it prints.

    The process of a command that ``needs_torch`` has imported it before. Any other starts anew, so that the bytes which
    it reads tell if it imports torch all the same.
    """
    python = "" if needs_torch else f"'{sys.executable}' "
    printed = run(f"{python}'{COUNTED}' '{folder}/counts.json' {command}", folder, cache=cache)
    return json.loads((folder / "counts.json").read_text()), printed
