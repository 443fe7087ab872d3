"""The weak scaling of Megatron-LM on 32 to 3,072 A100."""

from collections.abc import Mapping, Sequence

from launch.model.certainty import Origin
from launch.recipe.load import LoadedRecipe
from launch.yardstick.measured import MeasuredSet, PublishedRun, whole
from launch.yardstick.sets.a100_node import gpt_sizes


def _runs(recipe: LoadedRecipe, rows: Sequence[Mapping[str, str]]) -> list[PublishedRun]:
    runs = []
    for line, published in enumerate(rows, 2):
        row = {**published, "model.config.n_positions": published["data.sequence_length"]}
        if published["layers_per_virtual_stage"]:
            chunks = whole(row, "model.config.n_layer") // whole(row, "pp") // whole(row, "layers_per_virtual_stage")
            row["schedule"] = f"interleaved-1f1b:chunks={chunks}"
        runs.append(
            PublishedRun(
                line=line, row=row, sizes=gpt_sizes(row), group=(row["model"],), seconds=float(row["measured_s"])
            )
        )
    return runs


SET = MeasuredSet(
    name="megatron-sc21",
    title="Megatron-LM on 32 to 3,072 A100",
    file="megatron_sc21_table1.csv",
    source="Narayanan et al. (SC 2021), table 1",
    licence="table of a paper",
    system="Megatron-LM",
    read=_runs,
    origin=Origin.OTHER_SYSTEM,
    words="Our figures of the A100 were fitted to another set, a100-node. Calculon's predictions are 3.7 % off.",
    open="The two runs with the least tensor parallelism are the farthest off; their data-parallel groups of 32 cross "
    "nodes, and the recipe has the peak of the network only.",
)
