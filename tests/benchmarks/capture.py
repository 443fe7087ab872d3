"""Time and memory of `auto3d capture`, from the start of Python to its end: python -m tests.benchmarks.capture

Each model is captured by one process with an empty cache, and by a second one with the cache of the first.
"""

import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from tabulate import tabulate

from launch.report.release import Target
from tests.targets import end

SEQUENCE = 2048
GPT2 = """
model:
  architecture: GPT2LMHeadModel
  config: {{n_layer: {layers}, n_embd: {hidden}, n_head: {heads}, n_positions: {sequence}}}
data: {{source: synthetic, sequence_length: {sequence}, vocabulary_size: 50257}}
training: {{global_batch: 1}}
"""
SIZES = {  # layers, hidden size, heads
    "GPT-2 20B": (44, 6144, 64),
    "GPT-3 175B": (96, 12288, 96),
    **{f"GPT-2 of {layers} layers": (layers, 6144, 64) for layers in (24, 48, 96, 192, 384)},
}

FIGURES = {"processor time": " s", "cached": " s", "memory": " GiB"}  # name -> unit
WISHES = {  # on a quiet core
    "GPT-2 20B": (8.0, 0.7, 0.6),
    "GPT-3 175B": (17.0, 0.7, 0.6),
    "GPT-2 of 384 layers": (60.0, 1.0, 1.0),
}


def measure(folder: Path) -> tuple[float, float, dict]:
    """(seconds of the process, seconds of processor time, the JSON that it prints)."""
    begin, used = time.perf_counter(), processor_s()
    command = [sys.executable, "-m", "launch.main", "capture", str(folder / "model.yaml"), "--json"]
    environment = os.environ | {"AUTO3D_CACHE": str(folder / "cache")}
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, check=True)
    return time.perf_counter() - begin, processor_s() - used, json.loads(done.stdout)


def processor_s() -> float:
    """Processor seconds of all finished child processes."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def main() -> None:
    rows, targets = [], []
    for name, (layers, hidden, heads) in SIZES.items():
        with tempfile.TemporaryDirectory() as folder:
            recipe = GPT2.format(layers=layers, hidden=hidden, heads=heads, sequence=SEQUENCE)
            (Path(folder) / "model.yaml").write_text(recipe)
            cold_s, cold_processor_s, cold = measure(Path(folder))
            cached_s, _, cached = measure(Path(folder))
        assert cached["cached"]
        rows.append(
            (
                name,
                f"{cold['parameters'] / 1e9:.1f}",
                cold["operations"],
                cold["subgraphs"],
                f"{cold_s:.1f}",
                f"{cold_processor_s:.1f}",
                f"{cold['peak_bytes'] / 2**20:.0f}",
                f"{cached_s:.2f}",
                f"{cached['peak_bytes'] / 2**20:.0f}",
            )
        )
        print(f"  {name}: {cold_s:.1f} s cold, {cached_s:.2f} s cached", file=sys.stderr, flush=True)
        if wishes := WISHES.get(name):
            found = cold_processor_s, cached_s, cold["peak_bytes"] / 2**30
            targets += [
                Target(what=f"{name}, {what}", found=figure, wish=wish, unit=unit)
                for (what, unit), figure, wish in zip(FIGURES.items(), found, wishes, strict=True)
            ]
    headings = [
        "model", "billion\nparameters", "operations", "subgraphs", "cold\ns", "processor\ns", "peak\nMiB",
        "cached\ns", "peak\nMiB",
    ]  # fmt: skip
    print(tabulate(rows, headings, disable_numparse=True, colalign=["left", *["right"] * 8]))
    print("from the start of Python to its end, imports included")
    end(targets)


if __name__ == "__main__":
    main()
