"""GPT-2 on one H100 under this project's own runtime."""

from collections.abc import Mapping, Sequence

from launch.model.certainty import Origin
from launch.recipe.load import LoadedRecipe
from launch.yardstick.measured import FULLEST, MeasuredSet, PublishedRun, gpt

SIZES = gpt(layers=12, hidden=768, heads=12, vocabulary=50257, sequence=1024)


def _runs(recipe: LoadedRecipe, rows: Sequence[Mapping[str, str]]) -> list[PublishedRun]:
    return [
        PublishedRun(
            line=line,
            row=row,
            sizes=SIZES,
            group=("gpus=1",),
            seconds=float(row["measured_s"]),
            memory=((FULLEST, float(row["measured_bytes"])),),
        )
        for line, row in enumerate(rows, 2)
    ]


SET = MeasuredSet(
    name="h100-gpt2",
    title="GPT-2 on one H100 under this project's runtime",
    file="h100_gpt2_trials.csv",
    source="results/cuda of this project (2026)",
    licence="Apache-2.0",
    system="this project's runtime",
    read=_runs,
    origin=Origin.DATA_SHEET,
    fitted={
        "": "launch_us of recipes/accelerators/H100-80GB.yaml was fitted to the three runs whose micro-batch is 1 or 4"
    },
    words="The only set that this project measured, on two machines: with a micro-batch of 1 their hosts took 0.93 and "
    "1.43 s, so a prediction that does not know the host cannot be nearer than a quarter to both. The figures of the "
    "device are those of its data sheet and of products alone.",
    open="This page is made by a torch without CUDA, which captures bfloat16 by a CPU's rules: on a GPU more is kept "
    "in float32, so time and memory of large micro-batches are predicted too low here.",
)
