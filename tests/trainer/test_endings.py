"""How a script ends, that no launcher started: its exit code, its last line, and what it leaves behind."""

import os
import subprocess
import sys

import pytest

from tests.soak import soak

SCRIPT = """
import sys, threading, time
import auto3d
from tests.trainer import small

def work():
    time.sleep(2)
    print("the thread of the script has ended")

class Ends(small.TrainerCallback):
    def on_step_end(self, args, state, control, **_):
        threading.Thread(target=work).start()
        {ends}

auto3d.init(pp=1)
small.trainer(callbacks=[Ends()], max_steps=2).train()
"""


@pytest.mark.parametrize(
    ("ends", "code", "last_line"),
    [
        ("raise KeyError('mine')", 1, "KeyError: 'mine'"),
        ("raise KeyboardInterrupt", 130, "KeyboardInterrupt"),
        *soak(
            ("pass", 0, ""),
            ("sys.exit(3)", 3, ""),
            ("raise auto3d.InputError('a line')", 2, "auto3d: a line"),
        ),
    ],
)
def test_a_script_ends_as_python_ends_it(ends, code, last_line, tmp_path):
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    (tmp_path / "script.py").write_text(SCRIPT.format(ends=ends))
    environment = {**os.environ, "PYTHONPATH": os.getcwd(), "TMPDIR": str(temporary), "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "script.py"]
    ended = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=100)
    assert ended.returncode == code, ended.stderr
    assert "the thread of the script has ended" in ended.stdout
    if last_line:
        lines = [
            line for line in ended.stderr.splitlines() if not line.startswith("rank 0")
        ]  # a note says where the rank was
        assert lines[-1] == last_line
        assert sum(line.startswith("Traceback") for line in lines) <= 1
    assert not [name for name in os.listdir(temporary) if name.startswith("auto3d-")]
