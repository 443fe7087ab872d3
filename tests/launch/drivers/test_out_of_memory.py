"""Ranks that run out of memory, by a limit that each sets itself: the error, and the fraction that fits."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

WIDE = """
import ctypes
import resource
from pathlib import Path

import torch
from torch import nn

class Wide(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(8))

    def forward(self, x):
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x.mean()

def make(spare):
    if torch.empty(0).device.type == "cpu":  # not the meta device, so this is a rank about to train
        ctypes.CDLL(None).mallopt(-3, 2**16)  # M_MMAP_THRESHOLD: what is freed is given back, not kept for later
        Wide()(torch.ones(4, 32768, 16)).backward()  # libraries take memory at their first use
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + spare * 2**20,) * 2)
    return Wide()
"""
# A value of 8 MiB per layer; the first of two stages holds two micro-batches. Of the MiB that are left to a rank, 85
# are in the middle between what it needs if all is recomputed, 74, and if a fifth is kept, 96.
RECIPE = """
model: {factory: 'wide:make', arguments: {spare: 85}}
data: {source: synthetic, inputs: {x: {kind: normal, shape: [32768, 16]}}}
training: {global_batch: 8, iterations: 1, optimizer: sgd, momentum: 0}
measure: {warmup_iterations: 0, iterations: 1}
plan: {pp: 2, micro_batch_size: 4}
"""
# Threads of gloo reserve no address space beyond their stacks, and what is freed is given back at once.
PLAIN_MALLOC = {"MALLOC_ARENA_MAX": "1", "MALLOC_MMAP_THRESHOLD_": "65536"}


def run(folder: Path, *arguments: str, code: int = 0) -> subprocess.CompletedProcess:
    (folder / "wide.py").write_text(WIDE)
    (folder / "wide.yaml").write_text(RECIPE)
    command = [sys.executable, "-m", "launch.main", *arguments]
    environment = os.environ | PLAIN_MALLOC
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == code, f"{done.stdout}\n{done.stderr}"
    return done


def test_out_of_memory_is_reported_with_the_operation_and_the_predicted_bytes(folder):
    # 70 is in the middle between 50, with which the second forward begins, and 90, with which it ends.
    told = run(folder, "train", "wide.yaml", "model.arguments.spare=70", code=1).stderr
    assert "training ended as oom" in told
    assert "rank 0 (" in told
    assert "ran out of memory in F1@0; predicted for pipeline device 0: 0.102 GiB at B0@0: activations 0.0625, " in told
    assert "Traceback" not in told


@pytest.mark.soak
def test_trials_find_the_largest_fraction_that_fits(folder):
    first = run(folder, "recompute", "wide.yaml", "--json")
    found = json.loads(first.stdout)
    status = {one["recompute"]: one["status"] for one in found["tried"]}
    assert status[found["recompute"]] == "ok"
    fractions = [k / 5 for k in range(6)]
    assert status[fractions[fractions.index(found["recompute"]) + 1]] == "oom"
    assert "ran out of memory in " in first.stderr
    trials = sorted(path.stat().st_mtime_ns for path in (folder / "runs").rglob("measurement.json"))
    assert len(trials) == len(status) <= 3
    again = run(folder, "recompute", "wide.yaml")
    assert again.stdout == f"the largest that fits: auto3d train wide.yaml plan.recompute={found['recompute']!r}\n"
    assert trials == sorted(path.stat().st_mtime_ns for path in (folder / "runs").rglob("measurement.json"))
    run(folder, "train", "wide.yaml", f"plan.recompute={found['recompute']!r}")
