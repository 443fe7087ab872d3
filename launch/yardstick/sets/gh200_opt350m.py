"""OPT-350M on 1 to 32 nodes of four GH200, the validation data of Sailor."""

import json
from collections.abc import Mapping, Sequence
from itertools import accumulate

from launch.model.certainty import Origin
from launch.recipe.load import LoadedRecipe
from launch.yardstick.measured import FULLEST, MeasuredSet, PublishedRun, equal_devices_and_batch, gpt

SIZES = gpt(layers=24, hidden=1024, heads=16, vocabulary=50272, sequence=2048)
SOURCE = "Sailor (Strati et al., SOSP 2025), validation data"
SUBGRAPHS = 4  # subgraphs of a captured block of OPT: each of its norms stands alone


def _runs(recipe: LoadedRecipe, rows: Sequence[Mapping[str, str]]) -> list[PublishedRun]:
    measured_layers = recipe.values.model.layers is not None
    runs = []
    for line, published in enumerate(rows, 2):
        (dp, *_), (tp, *_) = json.loads(published["dp"]), json.loads(published["tp"])
        stages = json.loads(published["layers_per_stage"])
        row = {
            "micro_batch_size": published["mbs"],
            "tp": str(tp),
            "dp": str(dp),
            "pp": str(len(stages)),
            "partition_cuts": str(_cuts(stages, measured_layers=measured_layers)),
            "training.global_batch": published["gbs"],
        }
        runs.append(
            PublishedRun(
                line=line,
                row=row,
                sizes=SIZES,
                group=equal_devices_and_batch(row),
                seconds=float(published["real_s"]),
                memory=() if measured_layers else ((FULLEST, float(published["max_mem_bytes"])),),
            )
        )
    return runs


def _cuts(stages: Sequence[int], *, measured_layers: bool) -> list[int]:
    """Cuts between the stages; ``stages`` counts 26 layers: the embedding, 24 blocks and the head."""
    layers = list(accumulate(stages, initial=0))
    if measured_layers:
        return layers
    return [0, *(1 + SUBGRAPHS * (cut - 1) for cut in layers[1:-1]), 1 + SUBGRAPHS * SIZES.layers + 2]


WHOLE = MeasuredSet(
    name="gh200-opt350m",
    title="OPT-350M on 4 to 128 GH200, from the data sheet",
    file="gh200_opt350m_trials.csv",
    source=SOURCE,
    licence="MIT",
    system="Megatron-DeepSpeed, as Sailor uses it",
    read=_runs,
    origin=Origin.DATA_SHEET,
    fitted={
        "": "prediction.reserve_gib of the recipe, 4.4 GiB on each device, was fitted to the memory of these 15 runs"
    },
    words="Times from the data sheet, the products of an H100, DeepSpeed's host on A100 and two figures of its eager "
    "backward from layers of this model, and the memory of the fullest device. "
    "Sailor's own predictions of memory are 5.6 % off.",
    open="The runs hold 4.1 to 5.6 GiB more than the tensors, at every degree: perhaps the context and NCCL's buffers.",
)
FROM_LAYERS = MeasuredSet(
    name="gh200-opt350m-layers",
    title="OPT-350M on 4 to 128 GH200, time from measured layers",
    file="gh200_opt350m_trials.csv",
    source=SOURCE,
    licence="MIT",
    system="Megatron-DeepSpeed, as Sailor uses it",
    read=_runs,
    origin=Origin.FITTED,
    words="Our predictions take the measured passes of layers (gh200_opt350m_layers.csv), as Sailor's do, which are "
    "6 % off; the other predictors do not.",
    open="One run of data-parallel degree 4 spends 1.06 s of its 1.24 s in the gradient all-reduce, ten times as long "
    "as a group of 16. At a micro-batch of one sample the layers measured alone wait for their launches.",
)
