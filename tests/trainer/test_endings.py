"""How a script ends, that torchrun or no launcher started: its exit code, its last line, and what it leaves behind."""

import os
import subprocess
import sys

import pytest

from tests.promises.preloaded import SCRIPT as FORKED
from tests.promises.running import run
from tests.soak import soak
from tests.trainer.scripts import free_port

SCRIPT = """
import sys, threading, time
import auto3d
from transformers import LlamaConfig, LlamaForCausalLM, TrainerCallback

def work():
    time.sleep(2)
    print("the thread of the script has ended")

class Ends(TrainerCallback):
    def on_step_end(self, args, state, control, **_):
        threading.Thread(target=work).start()
        {ends}

auto3d.init(pp={ranks})
sizes = {{"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 2, "num_attention_heads": 1}}
model = LlamaForCausalLM(LlamaConfig(vocab_size=16, **sizes))
args = auto3d.TrainingArguments(output_dir="out", max_steps=2, use_cpu=True, report_to=[], disable_tqdm=True)
data = [{{"input_ids": [3] * 4, "labels": [3] * 4}}] * 16
auto3d.Trainer(model=model, args=args, train_dataset=data, callbacks=[Ends()]).train()
"""

ENVIRONMENT = {**os.environ, "PYTHONPATH": os.getcwd(), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}


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
    (tmp_path / "script.py").write_text(SCRIPT.format(ends=ends, ranks=1))
    environment = {**ENVIRONMENT, "TMPDIR": str(temporary)}
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


def test_a_script_of_torchrun_ends_with_one_line_and_exit_code_2(tmp_path):
    (tmp_path / FORKED).write_text(SCRIPT.format(ends="raise auto3d.InputError('a line')", ranks=2))
    printed = run(f"torchrun --nproc-per-node=2 --master-port={free_port()} {FORKED}", tmp_path, code=1)
    lines = [line for line in printed.splitlines() if "auto3d: " in line]
    assert [line for line in lines if line == "auto3d: a line"], printed
    assert set(lines) <= {"auto3d: a line", "auto3d: rank 1: a line"}, "rank 1's, if torchrun was slow to end it"
    assert "exitcode  : 2" in printed, printed
    assert printed.count("Traceback (most recent call last)") == 1, "torchrun's"
