"""A reader that raises or dies at a late sample of a function: the command says which, where and why."""

import socket

import pytest

READER = """
import os, signal
import torch.distributed as dist

SAMPLE = 300

class Samples:
    def __len__(self):
        return 512

    def __getitem__(self, number):
        if number == SAMPLE and dist.is_initialized() and dist.get_rank() == 0:
            FAULT
        return {"x": [number / 512.0] * 8, "y": number % 3}
"""
RECIPE = """
model: {factory: 'mine:make'}
data:
  source: reader:Samples
  shuffle: false
  inputs: {x: {kind: column, shape: [8], dtype: float32}, y: {kind: column}}
training: {global_batch: 8, iterations: 40, check_capture: false}
launch: {executor: local}
plan: {pp: 2, micro_batch_size: 4}
"""
PLACE = f"rank 0 on {socket.gethostname()}, in iteration 38 at F1@0 of stage 0,"  # 300 = 37 · 8 + 4
OTHER = f"rank 1 on {socket.gethostname()}, in iteration 38 at F"


@pytest.mark.parametrize(
    ("fault", "lines"),
    [
        (
            "raise OSError('no such photo')",
            ["OSError: no such photo", "reading sample 300 of reader:Samples failed", f"{PLACE} failed"],
        ),
        ("os._exit(7)", [f"{PLACE} ended with exit code 7", OTHER]),
        ("os.kill(os.getpid(), signal.SIGKILL)", [f"{PLACE} was killed by SIGKILL", OTHER]),
    ],
    ids=["raises", "exits", "is killed"],
)
def test_a_reader_that_fails_at_a_late_sample(folder, auto3d, fault, lines):
    (folder / "reader.py").write_text(READER.replace("FAULT", fault))
    (folder / "reads.yaml").write_text(RECIPE)
    error = auto3d("train", "reads.yaml", code=1).err
    found = error.splitlines()
    first = next(place for place, line in enumerate(found) if line.startswith(lines[0]))
    assert [line[: len(begin)] for line, begin in zip(found[first:], lines, strict=False)] == lines, error
