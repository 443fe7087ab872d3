"""A model whose forward goes through a set of strings: Python orders it anew in each process."""

import json
import os
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
from transformers import set_seed

from auto3d import Trainer, TrainingArguments
from auto3d.errors import InputError
from tests.trainer.scripts import begin, free_port

MODEL = """
import torch
from torch import nn


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.scales = nn.ParameterDict({name: nn.Parameter(torch.randn(4)) for name in "abcdef"})
        self.shared, self.layers = nn.Linear(4, 4), nn.ModuleList(nn.Linear(4, 4) for _ in range(6))

    def forward(self, x):
        made = {name: self.shared(x * self.scales[name]) for name in set(self.scales)}
        for name, layer in zip("abcdef", self.layers):
            x = x + layer(made[name]).tanh()
        return x.square().mean()
"""
SCRIPT = """
from auto3d import Trainer, TrainingArguments, init
from model import Model
from transformers import set_seed

init(pp=2)
set_seed(0)
args = TrainingArguments(output_dir="out", per_device_train_batch_size=2, max_steps=2, report_to=[], use_cpu=True)
data = [{"x": [1.0, 2.0, 3.0, float(sample)]} for sample in range(8)]
print("loss", Trainer(model=Model(), args=args, train_dataset=data).train().training_loss)
"""
RECIPE = """
model: {factory: "model:Model"}
data: {source: synthetic, inputs: {x: {kind: normal, shape: [4]}}}
"""
SETTINGS = {"output_dir": "out", "per_device_train_batch_size": 2, "max_steps": 2, "report_to": [], "use_cpu": True}
WITHOUT = {name: value for name, value in os.environ.items() if name != "PYTHONHASHSEED"}


def differing(world, folder, port):
    """The error of ranks that go through the names of a set in two orders, as under two hash seeds."""
    begin(world, folder, port)
    names = ", ".join(repr(name) for name in sorted("abcdef", reverse=bool(world.rank)))
    file = folder / f"model_{world.rank}.py"
    file.write_text(MODEL.replace("set(self.scales)", f"({names})"))
    model = runpy.run_path(str(file), run_name="model")["Model"]
    set_seed(0)
    data = [{"x": [1.0, 2.0, 3.0, float(sample)]} for sample in range(8)]
    with pytest.raises(InputError) as caught:
        Trainer(model=model(), args=TrainingArguments(**SETTINGS), train_dataset=data).train()
    return str(caught.value)


def test_ranks_whose_programs_differ_are_refused(processes, tmp_path: Path):
    for line in processes.run(2, differing, tmp_path, free_port()):
        assert "rank 0 and rank 1; where it goes through a set of strings, let it sort them, or start all" in line
        assert "PYTHONHASHSEED=0" in line
        assert "\n" not in line


@pytest.mark.soak  # test_ranks_whose_programs_differ_are_refused has the same two programs without a hash seed
def test_ranks_of_two_hash_seeds_are_refused(tmp_path: Path):
    (tmp_path / "model.py").write_text(MODEL)
    (tmp_path / "script.py").write_text(SCRIPT)
    common = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    ranks = [
        subprocess.Popen(
            [sys.executable, "script.py"],
            cwd=tmp_path,
            env={**os.environ, **common, "RANK": rank, "LOCAL_RANK": rank, "PYTHONHASHSEED": rank},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in ("0", "1")
    ]
    for rank in ranks:
        printed, _ = rank.communicate(timeout=120)
        line = printed.strip().splitlines()[-1]
        assert rank.returncode == 2, printed
        assert "rank 0 and rank 1; where it goes through a set of strings, let it sort them, or start all" in line
        assert "PYTHONHASHSEED=0" in line


def test_commands_order_strings_alike_in_every_process(tmp_path: Path):
    (tmp_path / "model.py").write_text(MODEL)
    (tmp_path / "recipe.yaml").write_text(RECIPE)
    command = [sys.executable, "-m", "launch.main", "capture", "recipe.yaml", "--json"]
    graphs = []
    for cache in "12":
        done = subprocess.run(
            command, cwd=tmp_path, env={**WITHOUT, "AUTO3D_CACHE": cache}, capture_output=True, text=True, check=True
        )
        graphs.append(json.loads(done.stdout)["graph"])
    assert graphs[0] == graphs[1], "the hash seed is another in each process"
