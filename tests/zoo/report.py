"""The text of results/zoo.md."""

from collections import Counter
from collections.abc import Sequence
from datetime import date
from pathlib import Path

from tabulate import tabulate

from auto3d.runtime.measurement import Environment
from tests.distributed.parity import GLOBAL_BATCH
from tests.zoo.drive import Finished
from tests.zoo.outcome import FAULTS, Result
from tests.zoo.trained import ITERATIONS, MICRO_BATCH

FILE = Path("results/zoo.md")


def report(finished: Sequence[Finished]) -> str:
    families: dict[str, list[Finished]] = {}
    for one in finished:
        families.setdefault(one.entry.family, []).append(one)
    results = [Result.RIGHT, Result.REFUSED, *FAULTS[::-1]]
    rows = [[family, len(members), *_counts(members, results)] for family, members in families.items()]
    rows.append(["all", len(finished), *_counts(finished, results)])
    counts = tabulate(rows, headers=["family", "models", *results], tablefmt="pipe", disable_numparse=True)
    tables = "\n\n".join(f"## {family}\n\n{_table(members)}" for family, members in families.items())
    return TEXT.format(
        counts=counts,
        tables=tables,
        here=Environment.here("cpu"),
        date=date.today().isoformat(),
        iterations=ITERATIONS,
        micro_batches=GLOBAL_BATCH // MICRO_BATCH,
        micro_batch=MICRO_BATCH,
    )


def _counts(members: Sequence[Finished], results: Sequence[Result]) -> list[int | str]:
    counts = Counter(one.outcome.result for one in members)
    return [counts[result] or "" for result in results]


def _table(members: Sequence[Finished]) -> str:
    rows = [[one.entry.name, one.outcome.result, _reason(one)] for one in members]
    return tabulate(rows, headers=["model", "", "reason"], tablefmt="pipe", disable_numparse=True)


def _reason(one: Finished) -> str:
    must = f" (it must be: {one.entry.only_refused})" if one.entry.only_refused else ""
    text = " ".join((one.outcome.reason + must).split()).replace("|", "\\|").replace(f"{Path.cwd()}/", "")
    packages = text.split("site-packages/")  # without the folder of this machine's environment
    return "".join([part.rpartition(" ")[0] + " " for part in packages[:-1]] + packages[-1:])


TEXT = """\
# The zoo

Models that the engine was not made for: classes of transformers, built tiny from their configurations, and modules
written as users write them. Each trains in a process of its own, at pp 2 (the uniform cut) and at dp 2 · pp 2 (a cut at
a third of the FLOPs), for {iterations} iterations of SGD with momentum over {micro_batches} micro-batches of
{micro_batch} samples, dropout off unless the entry is about dropout, and once more on plain, eager PyTorch on one
process. Each of the two stages has parameters that are trained.

*right*: the loss and the gradient norm of every iteration, every gradient of the first iteration and every parameter
and buffer after the last keep max|a − b| ≤ 10⁻⁵ · max|b| + 10⁻⁷ under both plans, on every rank. Where a model
magnifies rounding, a difference is right up to 3 times what plain PyTorch itself differs by when its initial weights
change by 10⁻⁷, at most 100 times the bound; the table says so. Where a part of a model is bfloat16, the bound is
10⁻² · max|b|. *refused*: one line that names the cause and the way out. *WRONG*: another difference, or nothing is
trained. *crashed*: another error. *hung*: no end within the time-out. *unclear*: a refusal in torch's own words, or in
several lines. *broken*: the entry does not run on plain PyTorch.

Buffers that a forward writes (batch statistics) are compared with those of a copy that has seen the same micro-batches.

{counts}

Made by `make zoo` on {here.device}, {here.cores} cores, Python {here.python}, torch {here.torch},
transformers {here.transformers}; {date}.

{tables}
"""
