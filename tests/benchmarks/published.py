"""Compare the cost model with published measurements: python -m tests.benchmarks.published

Writes results/published: a table, the worst rows, and a plot of predicted against measured for each file. The
measurements are in recipes/published/data. No row is predicted by parameters that were fitted to it.
"""

import csv
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import matplotlib as mpl
from scipy.stats import spearmanr
from tabulate import tabulate

from auto3d.cost.calibrate import COMPUTE, calibrate, with_parameters
from launch.model.calibration import by_group, measurements
from launch.model.costs import published
from launch.model.predictions import plan_rows, predict, read_candidates
from launch.recipe.load import load
from tests.targets import Target, end

mpl.use("Agg")
from matplotlib import pyplot as plt  # imported after choosing a backend that needs no screen

OUT = Path("results/published")
WORST = 6


@dataclass(frozen=True)
class Row:
    what: str  # the configuration, in words
    predicted_s: float
    measured_s: float

    @property
    def error(self) -> float:
        return self.predicted_s / self.measured_s - 1


def t4_gpt2() -> tuple[list[Row], str, list[Target]]:
    recipe = load("recipes/published/t4x16-gpt2.yaml")
    rows = []
    for one in predict(recipe, read_candidates(recipe, str(published("t4x16_gpt2_trials.csv")))):
        measured = float(one.row["measured_s"])
        if one.seconds is not None and measured < float("inf"):
            rows.append(Row(_words(one.row), one.seconds, measured))
    order = spearmanr([row.predicted_s for row in rows], [row.measured_s for row in rows])[0]
    targets = [
        Target(what="T4, Spearman's correlation", found=float(order), wish=0.95, least=True),
        Target(what="T4, mean error", found=mean_error(rows), wish=15, unit=" %"),
    ]
    return rows, f"Spearman {order:.3f} (target 0.95; AMP 0.935), mean error target 15 % (AMP 47.6 %).", targets


def a100_node() -> tuple[list[Row], str, dict[str, float], list[Target]]:
    recipe = load("recipes/published/a100-node.yaml")
    bound, measured = measurements(recipe, str(published("a100_single_node_iterations.csv")))
    found = calibrate(measured, COMPUTE, progress=lambda words: print("  a100:", words, file=sys.stderr, flush=True))
    rows = [
        Row(
            f"{_words(b.row)} hidden={b.row['model.config.n_embd']} layers={b.row['model.config.n_layer']}",
            one.seconds * (1 + error),
            one.seconds,
        )
        for b, one, error in zip(bound, measured, found.errors, strict=True)
    ]
    by_value = by_group(bound, found)
    groups = [f"{name}={value} {error:.1%}" for name, value, error, _ in by_value]
    # These eight parameters cannot reach the targets: iterations at tp = 4 that differ only in layers and micro-batches
    # are up to 30 % from groups that should take as long (docs/cost.md, "Accuracy"). They reach 6.0 and 10.4 %.
    targets = [
        Target(what="A100 node, mean error", found=mean_error(rows), wish=5, held=6.5, unit=" %"),
        Target(
            what="A100 node, largest mean of a group",
            found=100 * max(error for _, _, error, _ in by_value),
            wish=7,
            held=11,
            unit=" %",
        ),
    ]
    fitted = ", ".join(f"{name} {value:.3g}" for name, value in found.parameters.items())
    words = (
        f"Target 5 % in the mean (vTrain 8.37 %), no group above 7 %: {', '.join(groups)}. {len(COMPUTE)} parameters, "
        f"5-fold cross-validated; of all rows: {fitted}."
    )
    return rows, words, found.parameters, targets


def megatron_sc21(parameters: dict[str, float]) -> tuple[list[Row], str, list[Target]]:
    recipe = load("recipes/published/megatron-sc21.yaml")
    file = published("megatron_sc21_table1.csv")
    rows = read_candidates(recipe, str(file))
    with file.open(newline="") as lines:
        for row, printed in zip(rows, csv.DictReader(lines), strict=True):
            row["model.config.n_positions"] = printed["seq"]
            if chunk := printed["layers_per_virtual_stage"]:
                row["schedule"] = (
                    f"interleaved-1f1b:chunks={int(printed['layers']) // int(printed['pp']) // int(chunk)}"
                )
    found = []
    for one in plan_rows(recipe, rows):
        assert one.plan is not None, one.problem
        model = one.model.on(with_parameters(one.model.cluster, parameters))
        words = f"{one.row['model']} {_words(one.row)}"
        found.append(Row(words, model.seconds(one.plan), float(one.row["measured_s"])))
    targets = [
        Target(what="Megatron-LM, mean error", found=mean_error(found), wish=8, unit=" %"),
        Target(what="Megatron-LM, largest error", found=100 * max(abs(row.error) for row in found), wish=15, unit=" %"),
    ]
    words = "With the parameters fitted to one node; target 8 % in the mean, none above 15 % (Calculon 3.65 %)."
    return found, words, targets


def mean_error(rows: Sequence[Row]) -> float:
    """The mean absolute error in per cent."""
    return 100 * sum(abs(row.error) for row in rows) / len(rows)


def _words(row: Mapping[str, str]) -> str:
    columns = {"mb": "micro_batch_size", "tp": "tp", "dp": "dp", "pp": "pp"}
    return " ".join(f"{name}={row[column]}" for name, column in columns.items())


def report(name: str, title: str, rows: Sequence[Row], words: str) -> str:
    """The section of the report for ``rows``; also writes their plot."""
    figure, axes = plt.subplots(figsize=(4.5, 4.5))
    times = [time for row in rows for time in (row.predicted_s, row.measured_s)]
    limits = [min(times), max(times)]
    axes.plot(limits, limits, color="0.6", linewidth=1)
    axes.plot([row.measured_s for row in rows], [row.predicted_s for row in rows], ".", markersize=4)
    axes.set(xscale="log", yscale="log", title=title)
    axes.set(xlabel="measured, s per iteration", ylabel="predicted, s per iteration")
    figure.tight_layout()
    figure.savefig(OUT / f"{name}.png", dpi=110)
    plt.close(figure)
    errors = [abs(row.error) for row in rows]
    mean = sum(errors) / len(errors)
    worst = sorted(rows, key=lambda row: -abs(row.error))[:WORST]
    cells = [(row.what, f"{row.predicted_s:.3f}", f"{row.measured_s:.3f}", f"{row.error:+.1%}") for row in worst]
    return "\n".join(
        [
            f"## {title}\n",
            f"{len(rows)} iterations: mean error **{mean:.1%}**, largest {max(errors):.1%}. {words}\n",
            f"![predicted against measured]({name}.png)\n",
            "The worst:\n",
            tabulate(cells, ["", "predicted s", "measured s", "error"], "github", disable_numparse=True),
            "",
        ]
    )


INTRODUCTION = """# The cost model beside published measurements

    make bench                                # or this benchmark alone: python -m tests.benchmarks.published

Measured by others on real GPUs (vTrain, MICRO 2024; AMP, NeurIPS 2022; Narayanan et al., SC 2021), predicted by
`auto3d predict` with the recipes of recipes/published; the measurements are in recipes/published/data. An error is
predicted / measured - 1.
"""


def main() -> None:
    OUT.mkdir(parents=True, exist_ok=True)
    t4, t4_words, t4_targets = t4_gpt2()
    sections = [report("t4x16-gpt2", "GPT-2 on 16 T4 (AMP)", t4, t4_words)]
    a100, a100_words, parameters, a100_targets = a100_node()
    sections.append(report("a100-node", "GPT on a node of eight A100 (vTrain)", a100, a100_words))
    sc21, sc21_words, sc21_targets = megatron_sc21(parameters)
    sections.append(report("megatron-sc21", "Megatron-LM on 32 to 3,072 A100 (SC 2021)", sc21, sc21_words))
    table = [(row.what, f"{row.predicted_s:.2f}", f"{row.measured_s:.2f}", f"{row.error:+.1%}") for row in sc21]
    sections.append(tabulate(table, ["", "predicted s", "measured s", "error"], "github", disable_numparse=True) + "\n")
    text = "\n".join([INTRODUCTION, *sections])
    (OUT / "README.md").write_text(text)
    print(text)
    end([*t4_targets, *a100_targets, *sc21_targets])


if __name__ == "__main__":
    main()
