"""The suite's samples of the grids on simulated GPUs: python -m tests.cuda.simulated grid

Losses, norms, gradients, parameters and buffers must equal those of the CPU runtime, which the suite compares with
plain PyTorch in float32; in bfloat16, they are compared with plain PyTorch on a simulated GPU here.
"""

import json
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import TextIO

import click
import torch
import transformers

from tests.cuda.simulated import parity  # first: it says for which device models are captured
from tests.cuda.simulated.page import made_here
from tests.cuda.simulated.parity import Case, against_cpu, against_plain, report, train
from tests.distributed import grid, tensor_grid
from tests.models import LOW_PRECISION
from tests.pairwise import sample_of
from tests.processes import ProcessPool

ONCE = ("model", "sequence", "schedule", "recompute", "overlap")  # axes of tensor parallelism in bfloat16


def cases() -> Iterator[Case]:
    """The cells that the suite runs, and in bfloat16 each value of their axes once."""
    whole = [*grid.sample(), grid.UNEVEN]
    for cell in [*whole, *in_bfloat16(whole)]:
        degrees = (("dp", cell.dp), ("pp", cell.devices))
        yield Case(str(cell), cell.model, degrees, partial(grid.plan_of, cell))
    splits = tensor_grid.sample()
    low = [replace(split, model=f"{split.model}@bfloat16") for split in splits]
    low = [split for split in low if split.model in LOW_PRECISION]
    for split in [*splits, *(low[position] for position in sample_of([split.axes for split in low], once=ONCE))]:
        degrees = (("dp", split.dp), ("tp", split.tp), ("pp", split.pp))
        yield Case(str(split), split.model, degrees, partial(tensor_grid.plan_of, split))


def in_bfloat16(cells: list[grid.Cell]) -> list[grid.Cell]:
    """Some of ``cells`` whose models train under autocast, without dropout if only that model does."""
    low = []
    for cell in cells:
        for name in (f"{cell.model}@bfloat16", f"{cell.model.removesuffix('-dropout')}@bfloat16"):
            if name in LOW_PRECISION and cell.model in grid.MODELS:  # slices add gradients that are rounded
                low.append(replace(cell, model=name))
                break
    axes = [cell.axes for cell in low]
    return sorted((low[position] for position in sample_of(axes, once=axes[0].keys())), key=lambda cell: cell.model)


def run(of: Case, devices: ProcessPool, cpus: ProcessPool, *, figures: dict[str, float]) -> tuple[bool, str]:
    """Whether the numbers of ``of`` are right, and in which way; its largest differences are added to ``figures``."""
    ours = devices.run(of.ranks, partial(train, on_device=True), of)
    figures["CPU"], text = against_cpu(of, ours, cpus)
    if of.low_precision and (wrong := against_plain(of, ours, devices, cpus, figures)):
        return False, f"{text}; {wrong}"
    return figures["CPU"] < of.allowed, text


def recorded(of: Case, devices: ProcessPool, cpus: ProcessPool, file: TextIO | None, made: dict[str, str]) -> bool:
    """As ``report`` of ``run``; with a ``file`` it appends a line of what is found, and of what was ``made`` when."""
    figures: dict[str, float] = {}
    right = report(of, devices, cpus, partial(run, figures=figures))
    if file is not None:
        found = {"case": of.name, "model": of.model, "ranks": of.ranks, "right": right, "differences": figures}
        print(json.dumps(found | made), file=file, flush=True)
    return right


@click.command()
@click.argument("words", nargs=-1)
@click.option("--ranks", type=int, default=8, show_default=True, help="The largest number of ranks.")
@click.option("--of", type=(int, int), default=(0, 1), metavar="K N", help="Every Nth cell, from number K on.")
@click.option("--record", type=click.File("a"), help="Append a line for each cell to this file (page.py reads it).")
def main(words: tuple[str, ...], ranks: int, of: tuple[int, int], record: TextIO | None) -> None:
    """Compare the cells whose names have all WORDS."""
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    made = made_here() if record else {}
    chosen = [each for each in cases() if each.ranks <= ranks and all(word in each.name for word in words)]
    devices = ProcessPool(ranks, begin=parity.begin_on_device)
    with devices, ProcessPool(ranks, begin=parity.begin_on_cpu) as cpus:
        right = [recorded(each, devices, cpus, record, made) for each in chosen[of[0] :: of[1]]]
    print(f"{sum(right)} of {len(right)} cells are right")
    raise SystemExit(not all(right))


if __name__ == "__main__":
    main()
