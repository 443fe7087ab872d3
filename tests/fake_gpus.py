"""A command nvidia-smi that lists GPUs of a machine that has none, and a model whose ranks write down what they see."""

import json
from dataclasses import dataclass
from pathlib import Path

FOUR = "".join(f"GPU {n}: NVIDIA A100-SXM4-40GB (UUID: GPU-{n}{n}-a)\n" for n in range(4))
SPLIT = """\
GPU 0: NVIDIA A100-SXM4-40GB (UUID: GPU-00-a)
  MIG 3g.20gb     Device  0: (UUID: MIG-c6d4f1ef)
  MIG 3g.20gb     Device  1: (UUID: MIG-cba663e8)
GPU 1: NVIDIA A100-SXM4-40GB (UUID: GPU-11-a)
"""

# Each rank on a GPU captures the model, so each of them calls this: a program with a Function of the user's own is
# not kept, and no rank can read it. It waits until all that are expected have written.
WITNESS = """
import json
import os
import socket
import time
from multiprocessing import current_process
from pathlib import Path

import torch
from mine import Net

class Same(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        return gradient

class Captured(Net):
    def forward(self, x, y):
        return super().forward(Same.apply(x), y)

def make(expected, folder):
    name, seen = current_process().name, Path(folder) / "seen"
    if name.startswith("rank "):
        trial = os.environ.get("SLURM_JOB_ID") or str(os.getppid())  # on one machine, the process that forks the ranks
        devices = os.environ.get("CUDA_VISIBLE_DEVICES", "unset")
        place = {"trial": trial, "rank": int(name[5:]), "host": socket.gethostname(), "devices": devices}
        seen.mkdir(exist_ok=True)
        (seen / f".{trial}-{name}").write_text(json.dumps(place))
        (seen / f".{trial}-{name}").rename(seen / f"{trial}-{name}.json")
        deadline = time.monotonic() + 60
        while len(list(seen.glob("*.json"))) < expected and time.monotonic() < deadline:
            time.sleep(0.05)
    return Captured(16)
"""


@dataclass(frozen=True)
class Seen:
    """What a rank saw in CUDA_VISIBLE_DEVICES."""

    trial: str
    rank: int
    host: str
    devices: str


def write_nvidia_smi(folder: Path, text: str = FOUR) -> Path:
    """A folder for PATH whose nvidia-smi prints ``text``."""
    folder.mkdir(exist_ok=True)
    command = folder / "nvidia-smi"
    command.write_text(f"#!/bin/sh\ncat <<'END'\n{text}END\n")
    command.chmod(0o755)
    return folder


def seen_in(folder: Path) -> list[Seen]:
    """What the ranks of WITNESS wrote, by trial and rank."""
    found = [Seen(**json.loads(file.read_text())) for file in (folder / "seen").glob("*.json")]
    return sorted(found, key=lambda one: (int(one.trial.split("_")[0]), one.trial, one.rank))
