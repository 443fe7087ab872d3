"""GPT under 1F1B, interleaved 1F1B and the zero-bubble schedules on A100."""

from collections.abc import Mapping, Sequence
from itertools import accumulate
from math import ceil

from launch.model.certainty import Origin
from launch.recipe.load import LoadedRecipe
from launch.yardstick.measured import FULLEST, GIB, MeasuredSet, PublishedRun, whole
from launch.yardstick.sets.a100_node import gpt_sizes

SCHEDULES = {"1F1B": "1f1b", "1F1B-I": "interleaved-1f1b", "ZB-1p": "zb-1p", "ZB-2p": "zb-2p"}
ENDS = 2  # subgraphs of a GPT-2 before and after its blocks: the embeddings; the last norm, and head and loss


def _runs(recipe: LoadedRecipe, rows: Sequence[Mapping[str, str]]) -> list[PublishedRun]:
    runs = []
    for line, published in enumerate(rows, 2):
        if not published["iteration_s"]:
            continue  # the paper gives only bubble rates of the handcrafted schedules
        stages, layers = whole(published, "gpus"), whole(published, "layers")
        schedule = SCHEDULES[published["schedule"]]
        stage_layers = (layers + ENDS) // stages  # the first and the last stage have a layer less than the others
        chunks = stage_layers if published["schedule"] == "1F1B-I" else 1
        options = f":chunks={chunks}" if chunks > 1 else ""
        if published["schedule"].startswith("ZB-"):
            options = f":deferred={_deferred(published)}"
        row = {
            "micro_batch_size": published["micro_batch"],
            "tp": "1",
            "dp": "1",
            "pp": published["gpus"],
            "schedule": schedule + options,
            "partition_cuts": str(_cuts(layers, stages * chunks)),
            "training.global_batch": str(whole(published, "micro_batch") * whole(published, "micro_batches")),
            "model.config.n_layer": published["layers"],
            "model.config.n_embd": published["hidden"],
            "model.config.n_head": published["heads"],
            "model.config.n_positions": published["sequence"],
            "data.sequence_length": published["sequence"],
        }
        runs.append(
            PublishedRun(
                line=line,
                row=row,
                sizes=gpt_sizes(row),
                group=(published["model"], f"micro-batches={published['micro_batches']}"),
                seconds=float(published["iteration_s"]),
                memory=((FULLEST, float(published["memory_gb"]) * GIB),),
                baseline=published["schedule"] == "1F1B",
            )
        )
    return runs


def _deferred(published: Mapping[str, str]) -> int:
    """The percentage of a layer's activations that its weight half needs: 32 h of 34 h + 5 a s (Qi et al., table 1)."""
    hidden = whole(published, "hidden")
    return ceil(100 * 32 * hidden / (34 * hidden + 5 * whole(published, "heads") * whole(published, "sequence")))


def _cuts(layers: int, stages: int) -> list[int]:
    """Cuts in subgraphs, of which a block of GPT-2 has two: the first and the last stage have a block less."""
    stage_layers = (layers + ENDS) // stages
    blocks = [stage_layers - 1, *[stage_layers] * (stages - 2), stage_layers - 1]
    inner = [1 + 2 * count for count in accumulate(blocks)]
    return [0, *inner[:-1], 1 + 2 * layers + ENDS]


SET = MeasuredSet(
    name="zero-bubble",
    title="Zero-bubble schedules on eight A100",
    file="zero_bubble_a100_trials.csv",
    source="Qi et al. (ICLR 2024), tables 3 to 5",
    licence="tables of a paper",
    system="Megatron-LM",
    read=_runs,
    origin=Origin.OTHER_SYSTEM,
    words="ZB-1p and ZB-2p are fitted to the predicted times, within the memory of 1F1B and twice as much. The first "
    "and the last stage have a layer less than the others; interleaved chunks have one layer each. Relative: the time "
    "of a schedule over that of 1F1B.",
    open="The paper's devices update without waiting for each other, so iterations overlap; predicted ones do not.",
)
