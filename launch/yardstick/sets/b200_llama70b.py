"""LLaMA-3 70B, cut to 12 layers, on eight B200 under Megatron-LM, the validation data of SimuMax."""

import json
from collections.abc import Mapping, Sequence

from launch.model.certainty import Origin
from launch.recipe.load import LoadedRecipe
from launch.yardstick.measured import MIB, MeasuredSet, ModelSizes, PublishedRun, whole

SIZES = ModelSizes(
    layers=12,
    hidden=8192,
    heads=64,
    key_value_heads=8,
    ffn=28672,
    gated=True,
    vocabulary=128256,
    sequence=4096,
    tied=False,
)


FITTED, HELD_OUT = "8 micro-batches", "4 and 32 micro-batches"


def _runs(recipe: LoadedRecipe, rows: Sequence[Mapping[str, str]]) -> list[PublishedRun]:
    runs = []
    for line, row in enumerate(rows, 2):
        stage_ranks = whole(row, "tp") * whole(row, "dp")  # ranks of a stage, which are neighbours
        ranks = enumerate(json.loads(row["max_allocated_mb_by_rank"]))
        runs.append(
            PublishedRun(
                line=line,
                row=row,
                sizes=SIZES,
                group=(f"batch={row['training.global_batch']}",),
                parts=(FITTED if row["micro_batches"] == "8" else HELD_OUT,),
                seconds=float(row["measured_ms"]) / 1e3,
                memory=tuple((rank // stage_ranks, MIB * peak) for rank, peak in ranks),
            )
        )
    return runs


SET = MeasuredSet(
    name="b200-llama70b",
    title="LLaMA-3 70B of 12 layers on eight B200",
    file="b200_llama70b_ranks.csv",
    source="SimuMax 1.2 (release)",
    licence="Apache-2.0",
    system="Megatron-LM 0.14",
    read=_runs,
    origin=Origin.FITTED,
    fitted={
        FITTED: "matrix_efficiency of recipes/accelerators/B200-180GB.yaml was fitted to the times of these two runs"
    },
    words="Memory is the peak allocated on every rank. SimuMax's own predictions of memory are 0.06 to 1.4 % off.",
)
