"""docs/auto3d_in_300_lines.py trains on two processes as on one, says so truly, and sends its reader to real rooms."""

import ast
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

from tests.promises.preloaded import SCRIPT
from tests.soak import soak

ROOT = Path(__file__).parents[1]
FILE = ROOT / "docs/auto3d_in_300_lines.py"
FAULTS = {
    "each micro-batch counts as a whole batch": ("torch.tensor(1 / plan.micro_batches)", "torch.tensor(1.0)"),
    "the first stage gets another gradient": ("else received.grad", "else received.grad.flip(0)"),
    "every micro-batch reads the same samples": (
        "plan.inputs(iteration, number), None",
        "plan.inputs(iteration, 0), None",
    ),
}


def run_here(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The program ``text``, in this process and in those that it forks."""
    program = ModuleType("in_300_lines")
    monkeypatch.setitem(sys.modules, program.__name__, program)
    exec(compile(text, FILE, "exec"), program.__dict__)
    program.main()


def test_it_chooses_a_plan_and_trains_it_as_one_process_would(tmp_path):
    (tmp_path / SCRIPT).write_text(FILE.read_text())
    command = [sys.executable, SCRIPT]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True, timeout=300)
    *rows, first, second, parity = done.stdout.splitlines()
    assert rows[1].split()[-3:] == ["8", "4", "1f1b"]  # the best: 8 samples held, in micro-batches of 4
    assert first.startswith("rank 0: F0 F1 B0 F2 B1 F3 B2 B3; ")
    assert second.startswith("rank 1: F0 B0 F1 B1 F2 B2 F3 B3; ")
    found = re.fullmatch(r"parity: losses (\S+) to (\S+), 51 gradients and parameters", parity)
    assert found
    assert float(found[2]) < float(found[1])


@pytest.mark.parametrize("fault", [next(iter(FAULTS)), *soak(*list(FAULTS)[1:])])
def test_it_fails_without_parity(fault, monkeypatch):
    right, wrong = FAULTS[fault]
    text = FILE.read_text()
    assert text.count(right) == 1
    with pytest.raises(AssertionError, match="not close"):
        run_here(text.replace(right, wrong), monkeypatch)


def test_it_is_short_and_imports_nothing_of_the_project():
    text = FILE.read_text()
    assert len(text.splitlines()) <= 300
    imported = {
        name.split(".")[0]
        for node in ast.walk(ast.parse(text))
        for name in (
            [alias.name for alias in node.names]
            if isinstance(node, ast.Import)
            else [node.module or ""]
            if isinstance(node, ast.ImportFrom)
            else []
        )
    }
    assert imported <= sys.stdlib_module_names | {"torch"}


def test_each_part_names_rooms_that_exist():
    _, *parts = re.split(r"^# \d\. ", FILE.read_text(), flags=re.MULTILINE)
    rooms = [re.findall(r"\b(?:auto3d|launch|tests)/[\w/]+(?:\.py)?", part) for part in parts]
    assert len(parts) == 8
    assert all(rooms)
    assert not [room for part in rooms for room in part if not (ROOT / room).exists()]
