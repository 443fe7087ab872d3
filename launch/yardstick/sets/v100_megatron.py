"""GPT on 1 to 32 V100 under Megatron-LM, as Oneflow-Inc ran it to compare with their own system."""

from collections.abc import Mapping, Sequence

from launch.model.certainty import Origin
from launch.recipe.load import LoadedRecipe
from launch.yardstick.measured import MeasuredSet, PublishedRun, equal_devices_and_batch
from launch.yardstick.sets.a100_node import gpt_sizes


def _runs(recipe: LoadedRecipe, rows: Sequence[Mapping[str, str]]) -> list[PublishedRun]:
    sequence = str(recipe.values.data.sequence_length)
    return [
        PublishedRun(
            line=line,
            row=row,
            sizes=gpt_sizes({**row, "data.sequence_length": sequence}),
            group=(f"{row['model.config.n_embd']}x{row['model.config.n_layer']}", *equal_devices_and_batch(row)),
            seconds=float(row["measured_s"]),
        )
        for line, row in enumerate(rows, 2)
    ]


SET = MeasuredSet(
    name="v100-megatron",
    title="GPT on 1 to 32 V100 under Megatron-LM",
    file="v100_megatron_trials.csv",
    source="DLPerf reports (Oneflow-Inc, 2021)",
    licence="Apache-2.0",
    system="Megatron-LM",
    read=_runs,
    origin=Origin.FITTED,
    fitted={"": "the V100's figures in float16 were fitted to the runs whose tensor-parallel groups stay in a node"},
    words="Two runs are repeated under another name.",
    open="Tensor parallelism across nodes takes 1.6 to 2 times the predicted time: sums of activations there reach "
    "6 to 7 GB/s, where those of gradients reach 11.",
)
