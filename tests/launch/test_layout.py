"""What is slow to import, or large, is not imported by those who do without it."""

import subprocess
import sys

import pytest

LARGE = {"torch", "transformers", "scipy", "matplotlib"}


@pytest.mark.parametrize(
    ("module", "absent"),
    [
        ("launch.drivers.status", LARGE | {"numpy", "submitit"}),  # of status, logs and cancel
        ("launch.drivers.sweep", LARGE),  # of whoever submits trials, and follows them for days
        ("launch.drivers.tune", LARGE),
        ("launch.console.ranking", LARGE),
    ],
)
def test_imports(module, absent):
    script = f"import launch.commands, {module}, sys; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert not absent & set(done.stdout.split())
