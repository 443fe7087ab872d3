"""The public Python API: what the engine exports, and the documented example, run as its reader would run it."""

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

import auto3d

PAGE = Path(__file__).parents[1] / "docs" / "python.md"
EXAMPLE = re.search(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)[1]


def test_every_name_exists_and_is_documented():
    for name in auto3d.__all__:
        assert callable(getattr(auto3d, name)), name
        assert f"``{name}``" in auto3d.__doc__, name


def test_types_and_lazy_names_are_the_same():
    block = next(node for node in ast.parse(Path(auto3d.__file__).read_text()).body if isinstance(node, ast.If))
    typed = {alias.asname or alias.name: line.module for line in block.body for alias in line.names}
    assert typed == {name: place.split(":")[0] for name, place in auto3d._PLACES.items()}


def test_planning_alone_imports_no_torch():
    script = "import auto3d, sys; auto3d.Plan, auto3d.Cluster, auto3d.build_schedule; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert not {"torch", "numpy"} & set(done.stdout.split())


@pytest.mark.timeout(240)
def test_the_documented_example_runs(tmp_path):
    file = tmp_path / "example.py"
    file.write_text(EXAMPLE)
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=4", str(file)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=tmp_path)
    assert done.returncode == 0, done.stderr[-3000:]
    losses = [float(number) for number in re.search(r"loss \[(.*)\]", done.stdout)[1].split(",")]
    assert len(losses) == 5
    assert losses[-1] < losses[0]
