"""GPT-2 on 16 T4, the released trials of AMP."""

from collections.abc import Mapping, Sequence
from math import inf

from launch.model.certainty import Origin
from launch.recipe.load import LoadedRecipe
from launch.yardstick.measured import MeasuredSet, PublishedRun, gpt

SIZES = gpt(layers=24, hidden=1024, heads=16, vocabulary=52256, sequence=1024)


def _runs(recipe: LoadedRecipe, rows: Sequence[Mapping[str, str]]) -> list[PublishedRun]:
    return [
        PublishedRun(
            line=line,
            row=row,
            sizes=SIZES,
            group=(),
            seconds=seconds if (seconds := float(row["measured_s"])) < inf else None,
        )
        for line, row in enumerate(rows, 2)
    ]


SET = MeasuredSet(
    name="t4x16-gpt2",
    title="GPT-2 on 16 T4",
    file="t4x16_gpt2_trials.csv",
    source="AMP (Li et al., NeurIPS 2022), released results",
    licence="released results of a paper",
    system="DeepSpeed",
    read=_runs,
    origin=Origin.FITTED,
    words="Our times rest on AMP's measured layers, not on its trials. Five trials gave no result within 200 s for an "
    "unknown reason and are left out.",
    open="Plans with data parallelism and no pipeline are predicted 10 to 18 % too fast; AMP's released results do not "
    "say how its nodes share their network.",
)
