"""The public Python API: what the engine exports, and the documented example, run as its reader would run it."""

import ast
import os
import re
import socket
import subprocess
import sys
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path
from runpy import run_path

import pytest

import auto3d
from auto3d.runtime.process.world import World

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


def run_as_launched(world: World, file: Path, port: int) -> str:
    """What the script prints in this process, a rank by the environment that torchrun gives it."""
    ranks = {"RANK": world.rank, "LOCAL_RANK": world.rank, "WORLD_SIZE": world.size, "MASTER_PORT": port}
    os.environ |= {"MASTER_ADDR": "127.0.0.1"} | {name: str(number) for name, number in ranks.items()}
    with redirect_stdout(StringIO()) as printed:
        run_path(str(file), run_name="__main__")
    for name in ("MASTER_ADDR", *ranks):
        del os.environ[name]
    return printed.getvalue()


@pytest.mark.timeout(240)
def test_the_documented_example_runs(tmp_path, processes):
    """As four ranks; the promises start a command by torchrun."""
    file = tmp_path / "example.py"
    file.write_text(EXAMPLE)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    printed, *others = processes.run(4, run_as_launched, file, port)
    assert not any(others)
    losses = [float(number) for number in re.search(r"loss \[(.*)\]", printed)[1].split(",")]
    assert len(losses) == 5
    assert losses[-1] < losses[0]
