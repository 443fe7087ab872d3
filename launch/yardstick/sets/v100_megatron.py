"""GPT on 1 to 32 V100 under Megatron-LM, as Oneflow-Inc ran it to compare with their own system."""

from collections.abc import Mapping, Sequence

from launch.model.certainty import Origin
from launch.recipe.load import LoadedRecipe
from launch.yardstick.measured import MeasuredSet, PublishedRun
from launch.yardstick.sets.a100_node import gpt_sizes


def _runs(recipe: LoadedRecipe, rows: Sequence[Mapping[str, str]]) -> list[PublishedRun]:
    sequence = str(recipe.values.data.sequence_length)
    runs = []
    for line, row in enumerate(rows, 2):
        model = row["model.config.n_embd"], row["model.config.n_layer"]
        gpus = int(row["tp"]) * int(row["dp"]) * int(row["pp"])
        runs.append(
            PublishedRun(
                line=line,
                row=row,
                sizes=gpt_sizes({**row, "data.sequence_length": sequence}),
                group=(f"{model[0]}x{model[1]}", f"gpus={gpus}", f"batch={row['training.global_batch']}"),
                seconds=float(row["measured_s"]),
            )
        )
    return runs


SET = MeasuredSet(
    name="v100-megatron",
    title="GPT on 1 to 32 V100 under Megatron-LM",
    file="v100_megatron_trials.csv",
    source="DLPerf reports (Oneflow-Inc, 2021)",
    licence="Apache-2.0",
    system="Megatron-LM",
    read=_runs,
    origin=Origin.DATA_SHEET,
    words="Two runs are repeated under another name. The speed of a V100 in float16 is that of one layer, which others "
    "measured (layer_forward_seconds.csv).",
    open="Runs are faster than that layer, by a third on average; under tp 16 and 32, across nodes, they are slower.",
)
