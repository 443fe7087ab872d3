"""GPT-Neo-2.7B on 2 to 64 nodes of four GH200, further validation data of Sailor."""

from collections.abc import Mapping, Sequence

from launch.model.certainty import Origin
from launch.recipe.load import LoadedRecipe
from launch.yardstick.measured import FULLEST, MeasuredSet, PublishedRun, equal_devices_and_batch, gpt
from launch.yardstick.sets.gh200_opt350m import SOURCE

SIZES = gpt(layers=32, hidden=2560, heads=20, vocabulary=50257, sequence=2048)


def _runs(recipe: LoadedRecipe, rows: Sequence[Mapping[str, str]]) -> list[PublishedRun]:
    return [
        PublishedRun(
            line=line,
            row=row,
            sizes=SIZES,
            group=equal_devices_and_batch(row),
            seconds=float(row["measured_s"]),
            memory=((FULLEST, float(row["measured_bytes"])),),
        )
        for line, row in enumerate(rows, 2)
    ]


SET = MeasuredSet(
    name="gh200-gptneo",
    title="GPT-Neo-2.7B on 8 to 256 GH200, from the data sheet",
    file="gh200_gptneo_trials.csv",
    source=SOURCE,
    licence="MIT",
    system="Megatron-DeepSpeed, as Sailor uses it",
    read=_runs,
    origin=Origin.DATA_SHEET,
    words="Times from the data sheet, the products of an H100, DeepSpeed's host on A100 and two figures of its eager "
    "backward from layers of OPT-350M; none from GPT-Neo. Memory is that of the fullest device, with the reserve of "
    "gh200-opt350m. The recipe has Megatron-DeepSpeed's GPT with the sizes of GPT-Neo.",
    open="Why the eager backward takes so long: its attention moves twice what its kernels would, and its products "
    "reach a quarter of the forward's speed. The memory says that nothing was recomputed.",
)
