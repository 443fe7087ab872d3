"""Compare predicted with held bytes on every rank of a grid of trainings: python -m tests.benchmarks.memory

Writes results/memory/README.md. Every rank of every training counts the memory of all its tensors after each operator
of its second iteration; the estimate is the one that searches, refusals and reports use.
"""

from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path

import torch
from tabulate import tabulate

from launch.report.release import Target
from tests.memory_grid import Cell, Compared, compare, grid, plan_of
from tests.processes import ProcessPool
from tests.targets import end

OUT = Path("results/memory")
WORST = 10
TEXT = """# Predicted memory against the tensors of real ranks

Written by `python -m tests.benchmarks.memory`. {ranks} ranks of {trainings} trainings on CPUs: the schedules of the
table with every family, one and two tensor-parallel ranks, with and without recomputation, replicas of stages, sequence
parallelism, ZeRO-1, bfloat16. The models have hidden size 96 and 4 layers; a micro-batch has 8 samples of 64 tokens. A
rank's bytes are those of all tensors alive at once, counted after each operator of its second iteration, without
temporaries inside operators. The error is predicted / held - 1.

{table}

Worst rows:

{worst}

GPT-2, BERT and T5 tie weights across stages, which PipeDream cannot train; it runs with LLaMA and ViT. Where the error
is largest, a stage is partly recomputed (gradients of weights that several segments use are held longer than the
estimate says) or begins inside an attention, so that it exchanges views in another order than their memory.
"""


def main() -> None:
    torch.set_num_threads(1)
    rows: list[Compared] = []
    cells = list(grid())
    for cell in cells:
        plan_of(cell)  # captures its model before there are ranks
    with ProcessPool(4) as pool:
        for cell in cells:
            rows += compare(pool, cell)
            print(f"{rows[-1].error:+.3f} {cell}", flush=True)
    OUT.mkdir(parents=True, exist_ok=True)
    worst = sorted(rows, key=lambda row: -abs(row.error))[:WORST]
    listed = [
        (str(row.cell), row.rank, f"{row.peak.total / 2**20:.1f}", f"{100 * row.error:+.1f}", row.peak.at)
        for row in worst
    ]
    headings = ["training", "rank", "held MiB", "error %", "peak at"]
    (OUT / "README.md").write_text(
        TEXT.format(
            ranks=len(rows),
            trainings=len(cells),
            table=_table(rows),
            worst=tabulate(listed, headings, "github", disable_numparse=True),
        )
    )
    mean, largest = _mean(rows), max(abs(row.error) for row in rows)
    end(
        [
            Target(what="mean error of memory", found=100 * mean, wish=3.0, unit="%"),
            Target(what="largest error of memory", found=100 * largest, wish=6.0, unit="%"),
        ]
    )


def _mean(rows: Iterable[Compared]) -> float:
    errors = [abs(row.error) for row in rows]
    return sum(errors) / len(errors)


def _is_of(family: str, cell: Cell) -> bool:
    return cell.model.partition("-")[0] == family


def _runs(schedule: str, cell: Cell) -> bool:
    return cell.schedule == schedule


def _table(rows: list[Compared]) -> str:
    families = ("gpt2", "bert", "t5", "llama", "vit")
    schedules = dict.fromkeys(row.cell.schedule for row in rows)
    groups: dict[str, Callable[[Cell], bool]] = {
        "all": lambda cell: True,
        **{name: partial(_is_of, name) for name in families},
        **{f"schedule {name}": partial(_runs, name) for name in schedules},
        "tp 2": lambda cell: cell.tp == 2,
        "replicas": lambda cell: bool(cell.replicas),
        "recomputation": lambda cell: cell.recompute is not None,
        "ZeRO-1": lambda cell: cell.shard_optimizer,
        "bfloat16": lambda cell: "@" in cell.model,
    }
    cells = []
    for name, belongs in groups.items():
        found = [row for row in rows if belongs(row.cell)]
        errors = [row.error for row in found]
        ends = f"{100 * min(errors):+.1f} to {100 * max(errors):+.1f}"
        cells.append((name, len(found), f"{100 * _mean(found):.2f}", ends))
    return tabulate(cells, ["rows", "ranks", "mean error %", "range %"], "github", disable_numparse=True)


if __name__ == "__main__":
    main()
