"""Writes results/parity.md: python -m tests.distributed.parity_report (the end of `make parity`; minutes)

It compares every schedule on eight model families with one process, next to the result of the tracer of
torch.distributed.pipelining for the same models; tensor parallelism on six; and weights that two stages share after ten
iterations. Its exit status is 1 if a run of ours is wrong.
"""

import os
import re
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from datetime import date
from functools import lru_cache, partial
from itertools import product
from pathlib import Path
from typing import Any

os.environ["HF_HUB_OFFLINE"] = "1"

import numpy as np
import torch
import transformers
from tabulate import tabulate

from auto3d.capture.shard import Shard
from auto3d.errors import InputError
from auto3d.partition.methods.uniform import uniform
from auto3d.plan import SUB_PIPELINED
from auto3d.runtime.measurement import Environment
from auto3d.runtime.rank import check_plan
from auto3d.runtime.settings import OptimizerSettings, TrainingSettings
from auto3d.schedule import SCHEDULES, build_schedule, samples_at_once
from tests.distributed import asynchronous, tensor_grid, tracer
from tests.distributed.found_orders import FOUND, MICRO_BATCHES
from tests.distributed.grid import SLICES
from tests.distributed.parity import SGD, assert_close, assert_parity, make_plan, plain_pytorch, run_rank
from tests.models import captured
from tests.processes import ProcessPool
from tests.schedule.samples import BY_RULE, options_of

FILE = Path("results/parity.md")
MODELS = {
    "GPT-2": "gpt2",
    "BERT, pre-training": "bert-pretraining",
    "BERT, masked LM": "bert",
    "T5": "t5",
    "ViT": "vit",
    "Swin": "swin",
    "LLaMA": "llama",
    "ResNet": "resnet-transformers",
}
TIED = {"GPT-2": ("gpt2", "transformer.wte.weight"), "LLaMA, tied": ("llama-tied", "model.embed_tokens.weight")}
BATCH = tracer.Batch(micro_batch_size=2, micro_batches=MICRO_BATCHES, iterations=3, seed=5)
TIED_ITERATIONS = 10
OPTIMIZER = replace(SGD, clip_norm=0.0)
SLOW = replace(OPTIMIZER, learning_rate=0.01)  # none of the models diverges, which would magnify rounding
SILENT = ("auto3d", "asynchronous", "tensor-parallel")  # runs that are right and say so by their number alone
Gradients = list[dict[str, np.ndarray]]  # one dict per iteration, by parameter


@dataclass
class Report:
    """Results of the runs: the cells of tables, and the notes that they refer to."""

    notes: list[str] = field(default_factory=list)
    counts: dict[tuple[str, str], int] = field(default_factory=dict)  # (runtime, outcome) -> number of cells

    def cell(self, whose: str, outcome: str, *, error: float | None = None, note: str = "") -> str:
        self.counts[whose, outcome] = self.counts.get((whose, outcome), 0) + 1
        text = [] if outcome == "right" and whose in SILENT else [outcome]
        if error is not None:
            text.append(error_text(error))
        if note:
            if note not in self.notes:
                self.notes.append(note)
            text.append(f"[{self.notes.index(note) + 1}]")
        return " ".join(text)

    def count(self, whose: str) -> str:
        return ", ".join(f"{number} {outcome}" for (who, outcome), number in self.counts.items() if who == whose)


class Processes:
    """A pool that is restarted after a failed run, whose ranks may still be waiting for each other."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._pool = ProcessPool(size)

    def run(self, size: int, function: Callable[..., Any], *arguments: Any) -> list[Any]:
        try:
            return self._pool.run(size, function, *arguments)
        except AssertionError:
            self.close()
            self._pool = ProcessPool(self._size)
            raise

    def close(self) -> None:
        self._pool.__exit__()


@lru_cache
def reference(model: str, parts: int, dp: int, iterations: int, optimizer: OptimizerSettings = OPTIMIZER) -> list[dict]:
    """Plain PyTorch on one process."""
    return plain_pytorch(
        model,
        micro_batch_size=BATCH.micro_batch_size,
        global_batch=BATCH.samples * parts * dp,
        optimizer=optimizer,
        iterations=iterations,
        seed=BATCH.seed,
    )


def gradient_error(ranks: list[Gradients], expected: Gradients) -> float:
    """The largest error of any gradient on any rank in any iteration."""
    return max(
        error_of(gradient, gradients[name])
        for iteration, gradients in enumerate(expected)
        for rank in ranks
        for name, gradient in rank[iteration].items()
    )


def error_of_ranks(ranks: list[dict], expected: list[dict]) -> float:
    """As ``gradient_error``, for what ``run_rank`` and ``plain_pytorch`` return; a rank may hold shards."""
    return max(
        error_of(gradient, step["gradients"][name], rank["shards"].get(name))
        for rank in ranks
        for iteration, step in enumerate(expected)
        for name, gradient in rank["history"][iteration]["gradients"].items()
    )


def error_text(error: float) -> str:
    """One digit of ``error``, such as 2e-7."""
    return f"{error:.0e}".replace("e-0", "e-") if error else "0"


def error_of(ours: np.ndarray, theirs: np.ndarray, shard: Shard | None = None) -> float:
    """The error relative to the bound: 1e-5 means that the difference is exactly what the bound allows.

    ``ours`` is that ``shard`` of ``theirs``, if any; the bound is that of the whole tensor.
    """
    scale = np.abs(theirs).max() + 1e-2
    if shard is not None:
        theirs = shard.of(torch.from_numpy(theirs)).numpy()
    return float(np.abs(ours - theirs).max() / scale)


ASYNCHRONOUS = [name for name, order in SCHEDULES.items() if order.asynchronous]


def orders(devices: int) -> Iterator[tuple[str, str, dict]]:
    """Label, schedule and options of each synchronous schedule, and of orders that the search found."""
    for name in BY_RULE:
        for options in SLICES if "slices" in SCHEDULES[name].options else options_of(name, devices):
            if not build_schedule(name, devices=devices, micro_batches=devices, **options).weight_version:
                yield " ".join([name, *(f"{key}={value}" for key, value in options.items())]), name, options
    for found in FOUND:
        if found.devices == devices:
            recompute = ", recomputing" * found.recompute
            yield f"synthesized, {found.placement}{recompute}", "synthesized", found.options


def train(
    processes: Processes,
    model: str,
    name: str,
    options: dict,
    *,
    dp: int,
    pp: int,
    iterations: int,
    optimizer: OptimizerSettings = OPTIMIZER,
):
    """The histories of the ranks and of one process.

    Raises InputError if the plan is refused, and AssertionError if a rank failed.
    """
    schedule = build_schedule(name, devices=pp, micro_batches=BATCH.micro_batches, **options)
    plan = make_plan(
        model,
        dp=dp,
        pp=pp,
        micro_batch_size=BATCH.micro_batch_size * schedule.sample_parts,
        micro_batches=BATCH.micro_batches,
        schedule=name,
        options=options,
        stages=uniform(captured(model, BATCH.micro_batch_size).graph, schedule.stages),
        seed=BATCH.seed,
    )
    settings = TrainingSettings(iterations=iterations, optimizer=optimizer, device="cpu", threads_per_rank=1)
    check_plan(captured(model, samples_at_once(plan)), plan, settings)
    ranks = processes.run(plan.ranks, run_rank, model, plan, optimizer, None, None, iterations)
    return ranks, reference(model, schedule.sample_parts, dp, iterations, optimizer)


def failure(error: AssertionError) -> str:
    """The line of a traceback with the error; torch adds lines of advice to one of CUDA."""
    lines = [line for line in str(error).splitlines() if line and not line.startswith(" ")]
    return next((line for line in reversed(lines) if re.match(r"[\w.]+: ", line)), lines[-1])


def ours(report: Report, processes: Processes, model: str, *, name: str, options: dict, dp: int, pp: int) -> str:
    try:
        ranks, expected = train(processes, model, name, options, dp=dp, pp=pp, iterations=BATCH.iterations)
    except InputError as refusal:
        return report.cell("auto3d", "refused", note=str(refusal))
    except AssertionError as error:
        return report.cell("auto3d", "failed", note=failure(error))
    error = error_of_ranks(ranks, expected)
    try:
        assert_parity(ranks, expected)
    except AssertionError as difference:
        return report.cell("auto3d", "wrong", error=error, note=str(difference))
    return report.cell("auto3d", "right", error=error)


def tensor_cells() -> Iterator[tuple[str, dict]]:
    """Label and axes of each tensor-parallel row."""
    changes: dict[str, dict] = {
        "": {},
        "sequence parallel": {"sequence_parallel": True},
        "sub-pipelined": {"overlap": SUB_PIPELINED},
        "known rules": {"rules": tensor_grid.KNOWN},
    }
    degrees: dict[str, dict] = {
        "tp 2": {"dp": 1, "tp": 2, "pp": 1},
        "tp 4": {"dp": 1, "tp": 4, "pp": 1},
    } | {
        f"dp 2, tp 2, pp 2, {schedule}": {"dp": 2, "tp": 2, "pp": 2, "schedule": schedule}
        for schedule in tensor_grid.SCHEDULES_OF_TWO
    }
    for (size, axes), (change, others) in product(degrees.items(), changes.items()):
        if axes["pp"] == 1 or change != "known rules":
            yield ", ".join(filter(None, (size, change))), axes | others


def tensor_parallel(report: Report, processes: Processes, model: str, *, axes: dict) -> str:
    plan = tensor_grid.plan_of(tensor_grid.TensorCell(model=model, **axes))
    try:
        ranks = processes.run(plan.ranks, run_rank, model, plan, SLOW)
    except AssertionError as error:
        return report.cell("tensor-parallel", "failed", note=failure(error))
    expected = plain_pytorch(
        model, micro_batch_size=tensor_grid.SAMPLES, global_batch=plan.global_batch, optimizer=SLOW, seed=plan.seed
    )
    error = error_of_ranks(ranks, expected)
    try:
        assert_parity(ranks, expected)
    except AssertionError as difference:
        return report.cell("tensor-parallel", "wrong", error=error, note=str(difference))
    return report.cell("tensor-parallel", "right", error=error)


def share_that_is_split(model: str, *, tp: int, rules: str) -> str:
    """How much of the bytes of the parameters is split."""
    plan = tensor_grid.plan_of(tensor_grid.TensorCell(model=model, dp=1, tp=tp, pp=1, rules=rules))
    sizes = {name: value.bytes for name, value in captured(model, tensor_grid.SAMPLES).graph.parameters.items()}
    split = sum(sizes.get(name, 0) for name in plan.split)
    return f"{split / sum(sizes.values()):.0%} split"


def old_weights(report: Report, processes: Processes, model: str, *, name: str, dp: int, pp: int) -> str:
    """An asynchronous schedule, compared with one process that uses equally old weights."""
    plan = make_plan(
        model,
        dp=dp,
        pp=pp,
        micro_batch_size=BATCH.micro_batch_size,
        micro_batches=BATCH.micro_batches,
        schedule=name,
        seed=BATCH.seed,
    )
    settings = TrainingSettings(
        iterations=BATCH.iterations, optimizer=OPTIMIZER, device="cpu", threads_per_rank=1, timeout_s=60
    )
    try:
        check_plan(captured(model, BATCH.micro_batch_size), plan, settings)
    except InputError as refusal:
        return report.cell("asynchronous", "refused", note=str(refusal))
    try:
        ranks = processes.run(plan.ranks, asynchronous.run_rank, model, plan)
    except AssertionError as error:
        return report.cell("asynchronous", "failed", note=failure(error))
    expected = asynchronous.plain_pytorch_with_old_weights(model, plan)
    error = max(
        error_of(value, expected["parameters"][parameter])
        for rank in ranks
        for parameter, value in rank["parameters"].items()
    )
    try:
        asynchronous.assert_parity(ranks, expected)
    except AssertionError as difference:
        return report.cell("asynchronous", "wrong", error=error, note=str(difference))
    return report.cell("asynchronous", "right", error=error)


def theirs(report: Report, model: str, *, schedule: str, loss_inside: bool) -> str:
    """A run of the tracer, in separate processes."""
    with ProcessPool(4) as pool:
        try:
            ranks = pool.run(4, tracer.train_traced, model, schedule, loss_inside, BATCH, OPTIMIZER)
        except AssertionError as error:
            return report.cell("tracer", "hung", note=failure(error))
    errors = sorted((rank["at"], rank["error"]) for rank in ranks if "error" in rank)
    if errors:
        _, first = errors[0]  # later errors are its consequences
        return report.cell("tracer", "hung" if "Timed out" in first else "refused", note=first)
    expected = [step["gradients"] for step in reference(model, 1, 1, BATCH.iterations)]
    found = [rank["gradients"] for rank in ranks]
    try:
        for iteration, gradients in enumerate(expected):
            assert set().union(*(rank[iteration] for rank in found)) == set(gradients), "some gradients are missing"
            for rank, (name, gradient) in product(found, gradients.items()):
                assert_close(rank[iteration].get(name, gradient), gradient, f"gradient of {name}")
        return report.cell("tracer", "right", error=gradient_error(found, expected))
    except AssertionError as difference:
        return report.cell("tracer", "wrong", error=gradient_error(found, expected), note=str(difference))


def tied(report: Report, processes: Processes, of: tuple[str, str], *, name: str, options: dict) -> str:
    model, weight = of
    try:
        ranks, expected = train(processes, model, name, options, dp=1, pp=4, iterations=TIED_ITERATIONS, optimizer=SLOW)
        copies = [r["history"][-1]["parameters"][weight] for r in ranks if weight in r["history"][-1]["parameters"]]
        assert all(np.array_equal(copies[0], copy) for copy in copies), f"{len(copies)} copies of {weight} differ"
        assert_parity(ranks, expected)
    except AssertionError as error:
        return report.cell("tied", "wrong", note=failure(error))
    one = expected[-1]["parameters"][weight]
    error = float(np.abs(copies[0] - one).max() / np.abs(one).max())  # relative error: no weight is nearly zero
    return report.cell("tied", f"{len(copies)} equal" if len(copies) > 1 else "one", error=error)


def rows_of(labels: dict[str, Callable[[str], str]], models: dict[str, Any]) -> Iterator[list[str]]:
    """One row per label, with one cell for each of ``models``; each row is printed once it is complete."""
    for label, cell in labels.items():
        row = [label, *(cell(model) for model in models.values())]
        print(*row, sep=" | ", flush=True)
        yield row


def table(first: str, models: dict[str, Any], *groups: dict[str, Callable[[str], str]]) -> str:
    rows = [row for group in groups for row in rows_of(group, models)]
    return tabulate(rows, headers=[first, *models], tablefmt="pipe", disable_numparse=True)


def main() -> None:
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    report, processes = Report(), Processes(4)

    def cells(dp: int, pp: int) -> dict[str, Callable[[str], str]]:
        return {
            label: partial(ours, report, processes, name=name, options=options, dp=dp, pp=pp)
            for label, name, options in orders(pp)
        }

    of_tracer = {
        f"tracer, {schedule}, loss {'inside' if inside else 'outside'}": partial(
            theirs, report, schedule=schedule, loss_inside=inside
        )
        for inside, schedule in product((False, True), tracer.SCHEDULES)
    }

    def asynchronous_cells(dp: int, pp: int) -> dict[str, Callable[[str], str]]:
        return {
            f"{name}, dp {dp}, pp {pp}": partial(old_weights, report, processes, name=name, dp=dp, pp=pp)
            for name in ASYNCHRONOUS
        }

    of_tied = {
        label: partial(tied, report, processes, name=name, options=options) for label, name, options in orders(4)
    }
    four = table("pp 4", MODELS, cells(1, 4), of_tracer)
    two = table("dp 2, pp 2", MODELS, cells(2, 2))
    old = table("", MODELS, asynchronous_cells(1, 4), asynchronous_cells(2, 2))
    ten = table("pp 4", TIED, of_tied)
    processes.close()
    processes = Processes(8)
    shares = {
        f"tp {tp}, parameters, {rules}": partial(share_that_is_split, tp=tp, rules=rules)
        for rules, tp in product(tensor_grid.RULES, (2, 4))
    }
    of_tensor = {label: partial(tensor_parallel, report, processes, axes=axes) for label, axes in tensor_cells()}
    tensor = table("", tensor_grid.MODELS, shares, of_tensor)
    processes.close()

    FILE.write_text(
        TEXT.format(
            four=four,
            two=two,
            old=old,
            ten=ten,
            tensor=tensor,
            tensor_parallel=report.count("tensor-parallel"),
            tensor_micro_batches=tensor_grid.MICRO_BATCHES,
            notes="\n".join(f"{number}. {note}" for number, note in enumerate(report.notes, start=1)),
            ours=report.count("auto3d"),
            theirs=report.count("tracer"),
            asynchronous=report.count("asynchronous"),
            batch=BATCH,
            tied_iterations=TIED_ITERATIONS,
            slow=SLOW.learning_rate,
            fast=OPTIMIZER.learning_rate,
            here=Environment.here("cpu"),
            date=date.today().isoformat(),
        )
    )
    print(f"{FILE}:", *(f"{whose}: {report.count(whose)};" for whose in (*SILENT, "tied", "tracer")))
    sys.exit(any(outcome in ("wrong", "failed") for whose, outcome in report.counts if whose != "tracer"))


TEXT = """\
# Parity with one process

Each cell is one training run of an unmodified model over four processes, compared with plain PyTorch on one process
that accumulates the same micro-batches: fp32, {batch.iterations} iterations of SGD with momentum,
{batch.micro_batches} micro-batches of {batch.micro_batch_size} samples per replica, small models of the
families' own classes (`tests/models.py`), no dropout.

What is tested is the bound max|a − b| ≤ 10⁻⁵ · max|b| + 10⁻⁷ over the elements of each tensor, after every iteration
and on every rank, for loss, gradient norm, every gradient and every parameter: a run of auto3d that keeps it is right,
and its cell says nothing else. The number in the cell is the largest error of any gradient,
max|a − b| / (max|b| + 10⁻²). That is the bound's own form, as 10⁻⁷ = 10⁻⁵ · 10⁻²: 1e-5 is what it allows, 2e-7 a
fiftieth of that. A purely relative error would say nothing of gradients that are zero but for rounding, as that of the
bias of attention's keys is: there it is about 1, whoever computes it. 0 is equal bit by bit.

auto3d: {ours}; tensor-parallel: {tensor_parallel}; asynchronous: {asynchronous}. The tracer: {theirs}.

{four}

*tracer*: the same models through `torch.distributed.pipelining.pipeline`, split at three modules into four stages and
run by its `ScheduleGPipe` and `Schedule1F1B` over gloo, on the same micro-batches with the same optimizer. *loss
inside*: the model is given its labels, as it is under auto3d. *loss outside*: it is not, and its loss is written around
it by hand, which is how the tracer's schedules are meant to be used; T5 is then given its decoder's inputs too.
*right*, *wrong*: by the same bound on every gradient. *refused*: the first error of any rank. *hung*: no answer
within the time-out. Its schedules of several stages per rank (interleaved, zero bubble) are not tried; a stage of it
lives on one rank, so Chimera and GEMS have no counterpart.

{two}

## Tensor parallelism

The split is the one that auto3d derives from the graph alone, or that of the rules that transformers or auto3d has for
the model (*known rules*); the first rows say which fraction of the parameters' bytes it splits. *Sub-pipelined*: two
halves of each micro-batch take turns. The models have four heads, LLaMA two of keys and values, and vocabularies are of
255 tokens, which no degree divides. A rank's shard is compared with its part of the whole tensor, by the bound of the
whole tensor. There are {tensor_micro_batches} micro-batches per replica, and the learning rate is
a tenth of that above; all else is the same. `make parity` runs more cells, with recomputation and with dropout on what
all ranks of a group hold (`tests/distributed/tensor_grid.py`).

{tensor}

## Asynchronous schedules

They are not equal to plain training, as their weights are older; so they are compared with one process that runs each
micro-batch with weights that are as old (`tests/distributed/asynchronous.py` keeps a list of all versions of them). An
update clears the gradients it used: compared are the losses of all iterations and the parameters after the last, by the
same bound, and the number is the largest error of any parameter in the same form. PipeDream refuses models whose stages
share a weight, since they would see different versions of it.

{old}

## Tied weights after {tied_iterations} iterations

How many ranks hold a copy of the weight that embedding and head share, all equal bit by bit (one where a rank runs both
the first stage and the last), and their largest relative difference from one process. Everything else is compared too.
The learning rate is {slow:g}, not {fast:g}: at {fast:g} the gradient norm of LLaMA jumps to 13 in iteration 9, where a
change of the first weights by a rounding changes it by 10⁻⁵ on one process.

{ten}

## Notes

{notes}

Made by `make parity`, of which `python -m tests.distributed.parity_report` is the second half, on {here.device},
{here.cores} cores, Python {here.python}, torch {here.torch}, transformers {here.transformers}, gloo; {date}.
"""

if __name__ == "__main__":
    main()
