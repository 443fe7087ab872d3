"""Writes results/cuda/README.md from the files there: python -m tests.cuda.page"""

import csv
import json
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import numpy as np
from scipy.optimize import minimize
from tabulate import tabulate

from auto3d.runtime.measurement import Measurement
from tests.distributed.parity_report import error_text

FOLDER = Path("results/cuda")
SIZES = (1e8, 3e8, 1e9, 3e9, 1e10, 3e10, 1e11, 3e11, 3e12)  # FLOPs that divide the rows of the table of products
TILE, PROCESSORS = 128 * 256, 132  # elements of the result that a block of threads computes; those of an H100


def parity() -> str:
    """A row per case, with what its last run gave, and why cases failed."""
    records = [json.loads(line) for line in (FOLDER / "parity.jsonl").read_text().splitlines()]
    latest = {(each["case"].replace(", tp 1", ""), each["model"]): each for each in records}
    rows = [
        (
            *case,
            each.get("ranks", ""),
            each["verdict"],
            "" if each.get("error") is None else error_text(each["error"]),
        )
        for case, each in latest.items()
    ]
    table = tabulate(rows, ("case", "model", "ranks", "result", "largest error"), tablefmt="pipe")
    failed = [f"- {case}: {each['note']}" for (case, _), each in latest.items() if each["verdict"] != "right"]
    return "\n".join([table, "", *failed])


def trainer() -> str:
    """A row per script, with what every run of it gave under each plan."""
    records = [json.loads(line) for line in (FOLDER / "trainer.jsonl").read_text().splitlines()]
    plans = sorted({each["plan"] for each in records})
    cells: dict[str, dict[str, list[str]]] = {each["case"]: {plan: [] for plan in plans} for each in records}
    for each in records:
        error = f" ({each['error']:.0e})" if "error" in each else ""
        cells[each["case"]][each["plan"]].append(each["verdict"] + error)
    rows = [(case, *("; ".join(found) for found in of_plans.values())) for case, of_plans in cells.items()]
    return tabulate(rows, ("script", *plans), tablefmt="pipe")


def sweep() -> str:
    """What `auto3d sweep` printed, and the lines of the loop of plain PyTorch."""
    printed, plain = ((FOLDER / name).read_text().rstrip() for name in ("sweep.txt", "plain.txt"))
    return f"```text\n{printed}\n\n{plain}\n```"


def speed() -> str:
    return "\n".join(f"- {line}" for line in (FOLDER / "trainer_speed.txt").read_text().splitlines())


def products(alignment: int) -> np.ndarray:
    """[4, products]: m, n, k and seconds of the products in bfloat16 whose rows begin at multiples of these bytes."""
    with (FOLDER / "products.csv").open() as file:
        rows = [row for row in csv.DictReader(file) if (row["operation"], row["dtype"]) == ("product", "bfloat16")]
    table = np.array([[float(row[name]) for name in ("m", "n", "k", "seconds")] for row in rows]).T
    return table[:, np.gcd.reduce([*(2 * table[:3]).astype(int), np.full(len(rows), 16)]) == alignment]


def flops(table: np.ndarray) -> np.ndarray:
    return 2 * table[:3].prod(axis=0)


def rate(table: np.ndarray) -> float:
    """FLOP/s of all products of ``table`` one after another."""
    return float(flops(table).sum() / table[3].sum())


def fitted(law: Callable[[np.ndarray], np.ndarray], start: list[float], seconds: np.ndarray) -> np.ndarray:
    """The seconds that ``law`` gives for the positive numbers, near ``start``, with the least mean relative error."""

    def error(logarithms: np.ndarray) -> float:
        return float(np.abs(np.log(law(np.exp(logarithms)) / seconds)).mean())

    options = {"maxiter": 4000, "maxfev": 4000, "xatol": 1e-4, "fatol": 1e-6}
    return law(np.exp(minimize(error, np.log(start), method="Nelder-Mead", options=options).x))


def matrix_products() -> dict[str, str]:
    aligned = products(16)
    work, seconds = flops(aligned), aligned[3]
    m, n, k = aligned[:3]
    moved, waves = 2 * (m * k + k * n + m * n), m * n / TILE / PROCESSORS

    def by_size(x: np.ndarray) -> np.ndarray:
        return (work + x[1] * 1e9) / (x[0] * 1e12)

    def by_waves(x: np.ndarray) -> np.ndarray:
        last = np.ceil(waves) / waves - 1  # what idles in the last wave, in relation to all that works
        return work / (x[0] * 1e12) * (1 + x[3] * last) + x[1] * 1e-6 + moved / (x[2] * 1e12)

    law, of_waves = fitted(by_size, [750.0, 4.0], seconds), fitted(by_waves, [800.0, 4.0, 10.0, 0.1], seconds)
    rows = []
    for least, most in pairwise(SIZES):
        here = (work >= least) & (work < most)
        rates = work[here] / seconds[here] / 1e12
        rows.append(
            {
                "GFLOP": f"{least / 1e9:g} to {most / 1e9:g}",
                "products": int(here.sum()),
                "slowest tenth below": f"{np.quantile(rates, 0.1):.0f}",
                "median": f"{np.median(rates):.0f}",
                "fastest tenth above": f"{np.quantile(rates, 0.9):.0f}",
                "median of the law": f"{np.median(work[here] / law[here] / 1e12):.0f}",
            }
        )
    return {
        "products": tabulate(rows, "keys", tablefmt="pipe", disable_numparse=True),
        "count": str(len(seconds)),
        "law_error": f"{np.abs(np.log(law / seconds)).mean():.1%}",
        "waves_error": f"{np.abs(np.log(of_waves / seconds)).mean():.1%}",
        "at_2": f"{rate(products(2)) / 1e12:.0f}",
        "at_4": f"{rate(products(4)) / 1e12:.0f}",
        "at_16": f"{rate(aligned[:, (aligned[:3] == 50304).any(axis=0)]) / 1e12:.0f}",
    }


def main() -> None:
    measured = Measurement.from_json((FOLDER / "measurements.jsonl").read_text().splitlines()[0])
    assert measured.environment is not None
    text = TEXT.format(
        parity=parity(),
        trainer=trainer(),
        speed=speed(),
        sweep=sweep(),
        made_on=measured.environment.computer_and_software,
        date=measured.finished[:10],
        **matrix_products(),
    )
    (FOLDER / "README.md").write_text(text)


TEXT = """\
# On a real GPU

{made_on}.
Where nothing else is said, the figures are of {date}.

## Parity

Small models under plans of several ranks, compared with plain PyTorch in one process on the same GPU: losses, gradient
norms, gradients and parameters by the bound of [parity.md](../parity.md), in float32 without TF32 and with
deterministic algorithms. The ranks share the GPU, each as a host of its own, so NCCL connects them through sockets
(`tests/cuda/one_gpu.py`). A name with digits is a cell of the suite's sample of the grid. *largest error*: that of any
gradient, in the form of that bound, of which 1e-5 is allowed. `python -m tests.cuda.parity FILE --ranks 4` appends such
records, as root; these are from runs beside each other on three machines of the same kind, on 2026-11-26, 27 and 28,
each ended by its time before it had reached all cases.

{parity}

Both are mended since: T5 is right in a later row, where it is recomputed too. The model of two losses multiplied a
tensor of the GPU by one of the CPU, which plain PyTorch refuses as well; it was not run again.

## Trainer

Scripts for transformers' Trainer (those of `tests/trainer/`), and the same scripts for auto3d's, whose ranks share the
GPU: losses, gradient norms, rates and results of evaluations. In brackets: the largest relative difference of these
numbers, of which 1e-4 is allowed, and 0.02 in bfloat16. `python -m tests.cuda.trainer FILE --degree pp 2` appends such
records, as root; these are from two machines of the same kind on 2026-11-27, where many such runs went on beside each
other. Empty: not run there.

{trainer}

What failed: "weights of classes" and "a teacher of the trainer" kept tensors on the CPU in the first run, in which
transformers' Trainer fails as well, and "a last batch in part" asked for deterministic kernels that torch lacks; the
scripts are mended. Six more, the first of each of six processes, ended at the same time with an error of CUDA, when 20
ranks began to use the GPU at once; its cause is not known. Four of them are right in the other run.

GPT-2 of 124 million parameters in bfloat16, 32 sequences of 1,024 tokens per step, in both Trainers on one GPU
(`python -m tests.cuda.trainer_speed MICRO_BATCH [auto3d]`; median of 9 steps):

{speed}

With a micro-batch of 1, the host is the slower part in both; these two lines are of one machine on 2026-11-28. Before
copies of weights became leaves of autograd, which takes a third of its calls of Python from an iteration in bfloat16,
auto3d took 1.3266 s on a machine where transformers took 1.1310 s.

The script for auto3d's Trainer then aborted: Python's shutdown met the thread that reads inputs ahead in the middle of
a call of torch (exit code 134). The process now ends this thread first; that was tried on a simulated CUDA only.

## One GPU

GPT-2 of 124 million parameters in bfloat16, 32 sequences of 1,024 tokens per iteration: `auto3d sweep
tests/cuda/gpt2.yaml`, then a loop of plain PyTorch with fused AdamW (`python -m tests.cuda.plain tests/cuda/gpt2.yaml`)
on the same machine. Two other machines of the same kind took 0.929 and 1.429 s for a micro-batch of 1, where the host
is the slower part.

{sweep}

The predictions are those of `recipes/accelerators/H100-80GB.yaml` as it was then, with another system's host, which
launches operations more slowly. [The yardstick](../published/README.md) has all predictions for measured GPUs.

## Matrix products

{count} products in bfloat16 of the sizes of transformers' linear layers, forward and backward, of 512 to 16,384 tokens,
whole and split 2 to 8 ways (`python -m tests.cuda.products > results/cuda/products.csv`), on another machine of the
same kind on 2026-11-27. TFLOP/s by size:

{products}

*the law*: that of the cost model, (FLOPs + a constant) / rate, with the two figures that fit best; it misses a product
by {law_error} on average. A law that also counts the waves of tiles on the processors, operands and a launch misses it
by {waves_error}: shapes explain little beyond the size, so the model keeps its law.

Rows that begin at no multiple of 16 bytes are another matter. With a vocabulary of 50,257, an odd number, the three
products of a head together reach {at_2} TFLOP/s; with 30,522 (BERT), which 2 divides and 8 does not, {at_4}; with
50,304, a multiple of 8, {at_16}. `tflops_at_2_bytes` and `tflops_at_4_bytes` of an accelerator are the first two.

Made by `python -m tests.cuda.page` from the files beside this page.
"""

if __name__ == "__main__":
    main()
