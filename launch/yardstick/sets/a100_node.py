"""GPT on one node of eight A100 under Megatron-DeepSpeed, the validation data of vTrain."""

from collections.abc import Mapping, Sequence

from launch.model.certainty import Origin
from launch.recipe.load import LoadedRecipe
from launch.yardstick.measured import MeasuredSet, ModelSizes, PublishedRun, gpt, whole


def _runs(recipe: LoadedRecipe, rows: Sequence[Mapping[str, str]]) -> list[PublishedRun]:
    return [
        PublishedRun(
            line=line,
            row=row,
            sizes=gpt_sizes(row),
            group=(
                f"hidden={row['model.config.n_embd']}",
                f"layers={row['model.config.n_layer']}",
                f"gpus={row['gpus']}",
                f"batch={row['training.global_batch']}",
            ),
            seconds=float(row["measured_ms"]) / 1e3,
        )
        for line, row in enumerate(rows, 2)
    ]


def gpt_sizes(row: Mapping[str, str], *, vocabulary: int = 51200) -> ModelSizes:
    """The sizes of a GPT-2 whose configuration stands in ``row``."""
    return gpt(
        layers=whole(row, "model.config.n_layer"),
        hidden=whole(row, "model.config.n_embd"),
        heads=whole(row, "model.config.n_head"),
        vocabulary=vocabulary,
        sequence=whole(row, "data.sequence_length"),
    )


SET = MeasuredSet(
    name="a100-node",
    title="GPT on a node of eight A100",
    file="a100_single_node_iterations.csv",
    source="vTrain (Bang et al., MICRO 2024), validation data",
    licence="released data of a paper",
    system="Megatron-DeepSpeed",
    read=_runs,
    origin=Origin.FITTED,
    interpolated=True,
    fitted={
        "": "eight figures of recipes/accelerators/A100-80GB.yaml were fitted to these 960 runs; `auto3d calibrate` "
        "cross-validates them in five folds, with the same mean error within 0.1 %"
    },
    words="vTrain's own predictions are 8.4 % off.",
    open="Runs at tp = 4 that differ only in layers and micro-batches are up to 30 % from groups that should take as "
    "long (docs/cost.md).",
)
