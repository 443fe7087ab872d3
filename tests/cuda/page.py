"""Writes results/cuda/README.md from the files there: python -m tests.cuda.page"""

import csv
import json
from pathlib import Path

from tabulate import tabulate

from auto3d.runtime.measurement import Measurement
from tests.distributed.parity_report import error_text

FOLDER = Path("results/cuda")
MIB = 2**20


def parity() -> str:
    records = [json.loads(line) for line in (FOLDER / "parity.jsonl").read_text().splitlines()]
    rows = [
        (
            each["case"],
            each["model"],
            each.get("ranks", ""),
            each["verdict"],
            "" if each.get("error") is None else error_text(each["error"]),
            each.get("note", ""),
        )
        for each in records
    ]
    return tabulate(rows, ("case", "model", "ranks", "result", "largest error", "note"), tablefmt="pipe")


def training() -> tuple[str, Measurement]:
    plain = {line.split(":")[0].rpartition(" ")[2]: line for line in (FOLDER / "plain.txt").read_text().splitlines()}
    with (FOLDER / "table.csv").open() as file:
        predicted_s = {row["micro_batch_size"]: float(row["predicted_s"]) for row in csv.DictReader(file)}
    found = [Measurement.from_json(line) for line in (FOLDER / "measurements.jsonl").read_text().splitlines()]
    rows = []
    for each in found:
        size = str(each.plan.micro_batch_size)
        (peak,), (predicted,), (used,) = each.peak_bytes, each.predicted_bytes, each.used_bytes
        rows.append(
            {
                "micro-batch": size,
                "auto3d (s)": f"{each.median_s:.3f}",
                "plain (s)": plain[size].split(": ")[1].split(" s")[0],
                "predicted (s)": f"{predicted_s[size]:.3f}",
                "error of time": f"{predicted_s[size] / each.median_s - 1:+.0%}",
                "peak (MiB)": f"{peak / MIB:.0f}",
                "predicted (MiB)": f"{predicted / MIB:.0f}",
                "error of memory": f"{predicted / peak - 1:+.1%}",
                "on the device (MiB)": f"{used / MIB:.0f}",
            }
        )
    return tabulate(rows, "keys", tablefmt="pipe", disable_numparse=True), found[0]


def main() -> None:
    table, measured = training()
    assert measured.environment is not None
    made_on = measured.environment.computer_and_software
    text = TEXT.format(parity=parity(), training=table, made_on=made_on, date=measured.finished[:10])
    (FOLDER / "README.md").write_text(text)


TEXT = """\
# On a real GPU

{made_on}; {date}.

## Parity

Small models under plans of several ranks, compared with plain PyTorch in one process on the same GPU: losses, gradient
norms, gradients and parameters by the bound of [parity.md](../parity.md), in float32 without TF32 and with
deterministic algorithms. The ranks share the GPU, each as a host of its own, so NCCL connects them through sockets
(`tests/cuda/one_gpu.py`). A name with digits is a cell of the suite's sample of the grid. *largest error*: that of any
gradient, in the form of that bound, of which 1e-5 is allowed. `python -m tests.cuda.parity FILE --ranks 4` appends such
records, as root; these are from two such runs beside each other, ended by their time.

{parity}

The refused capture is mended since, but was not tried on a GPU again: autocast on GPUs computes cross entropy in two
precisions, which a program then could not say.

## One GPU

GPT-2 of 124 million parameters in bfloat16, 32 sequences of 1,024 tokens per iteration (`tests/cuda/gpt2.yaml`).
*auto3d*: `auto3d sweep tests/cuda/gpt2.yaml`. *plain*: a loop of plain PyTorch with fused AdamW
(`python -m tests.cuda.plain tests/cuda/gpt2.yaml`), which ran in another session, on another machine of the same kind:
at micro-batches of 1 and 4 the host is the slower part, and its speed differs between machines. *peak*: bytes of live
tensors; *on the device*: with all that torch's allocator holds, CUDA's context and NCCL's buffers. The predictions are
from before anything was measured on the machine: `recipes/accelerators/H100-80GB.yaml` describes another system's host,
which launches operations more slowly, and nothing there says that products with a vocabulary of 50,257, which 8 does
not divide, are slow.

{training}

Made by `python -m tests.cuda.page` from the files beside this page.
"""

if __name__ == "__main__":
    main()
