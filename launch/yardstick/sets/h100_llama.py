"""LLaMA on 1 to 64 nodes of eight H100 under nanotron, the benchmarks of the Ultra-Scale Playbook."""

from collections.abc import Mapping, Sequence

from launch.model.certainty import Origin
from launch.recipe.load import LoadedRecipe
from launch.recipe.settings import cluster
from launch.yardstick.measured import GIB, MeasuredSet, ModelSizes, PublishedRun, whole

LEAST_MFU = 0.1  # the error of time counts runs that use at least this part of the peak
MOST_TP = 8  # larger tensor-parallel groups cross nodes, where this version of nanotron often crashes
HELD_OUT, ONE, MORE = "3.57B", "one node", "more nodes"
FIGURES = "recipes/accelerators/H100-80GB-nanotron.yaml"
FITTED = {
    f"1.34B, {ONE}": f"all figures of {FIGURES} but crossing_launch_us were fitted to the runs of at least 10 % MFU",
    f"1.34B, {MORE}": f"crossing_launch_us of {FIGURES} was fitted to the runs on two nodes of at least 10 % MFU",
}


def _runs(recipe: LoadedRecipe, rows: Sequence[Mapping[str, str]]) -> list[PublishedRun]:
    peak = cluster(recipe).nodes[0].accelerator.peak_flops
    runs = []
    for line, row in enumerate(rows, 2):
        ran, nodes, sizes = row["run_ok"] == "1", row["cluster.nodes"], _sizes(row)
        seconds = float(row["measured_s"]) if ran else None
        flops = sizes.flops_per_sample * whole(row, "training.global_batch")
        timed = seconds is not None and flops / seconds / whole(row, "gpus") / peak >= LEAST_MFU
        plausible = not row["memory_gb"] and whole(row, "tp") <= MOST_TP
        part = row["model"] if row["model"] == HELD_OUT else f"{row['model']}, {ONE if nodes == '1' else MORE}"
        runs.append(
            PublishedRun(
                line=line,
                row=row,
                sizes=sizes,
                group=(row["model"], f"nodes={nodes}", f"batch={row['training.global_batch']}"),
                parts=(part, f"{part}, MFU ≥ {LEAST_MFU:.0%}") if timed else (part,),
                seconds=seconds,
                timed=timed,
                memory=((0, float(row["memory_gb"]) * GIB),) if ran else (),
                ran=True if ran else False if plausible else None,
            )
        )
    return runs


def _sizes(row: Mapping[str, str]) -> ModelSizes:
    heads = whole(row, "model.config.num_attention_heads")
    return ModelSizes(
        layers=whole(row, "model.config.num_hidden_layers"),
        hidden=whole(row, "model.config.hidden_size"),
        heads=heads,
        key_value_heads=heads,
        ffn=whole(row, "model.config.intermediate_size"),
        gated=True,
        vocabulary=whole(row, "vocab"),
        sequence=whole(row, "sequence"),
        tied=row["tied"] == "1",
    )


SET = MeasuredSet(
    name="h100-llama",
    title="LLaMA on 8 to 512 H100",
    file="h100_llama_trials.csv",
    source="Ultra-Scale Playbook's benchmarks (Hugging Face, 2025)",
    licence="Apache-2.0",
    system="nanotron 0.5",
    read=_runs,
    origin=Origin.FITTED,
    interpolated=True,
    fitted={part: words for kind, words in FITTED.items() for part in (kind, f"{kind}, MFU ≥ {LEAST_MFU:.0%}")},
    words="Memory is that of rank 0, on the first stage. The error of time counts runs of at least 10 % MFU (model "
    "FLOP/s, with attention and head, over the peak); order and regret are given for all that ran and for those runs. "
    "The file does not say why a run failed. A failed run counts as out of memory unless it has a memory and a time "
    "all the same (15), or tp above 8, where crashes are as likely.",
    open="One iteration of each run was timed, the fourth. nanotron's partition, its sums and what its loss keeps were "
    "read in its source, and chosen where that is silent by people who had seen the runs of 3.57B. Pipelines across "
    "nodes are slower than their operations and messages, in proportion to tp. Pipelines without ZeRO-1 at "
    "data-parallel degrees of 32 and more are predicted 18 to 48 % too fast. At tp of 2 or more there are two kinds of "
    "runs, of which only one keeps the gathered inputs.",
)
