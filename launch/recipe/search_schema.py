"""The keys of a search space, and of the one plan of a training."""

from dataclasses import dataclass
from typing import Any

from auto3d.partition.methods import STAGE_METHODS
from auto3d.plan import AUTO3D, ENGINES, TENSOR_OVERLAPS
from auto3d.schedule import SCHEDULES
from auto3d.schedule.options import SYNC
from auto3d.search.algorithms import ALGORITHMS
from auto3d.search.placement import PLACEMENTS
from auto3d.search.space import ORDER_SECONDS, REPLICAS
from launch.recipe.schema_key import AUTO, LARGEST_INTEGER, LARGEST_TIME_S, key

RECOMPUTE = ("none", "full", AUTO)


@dataclass
class SearchRecipe:
    dp: Any = key(AUTO, "data-parallel degrees to try; auto: every divisor of the number of devices", least=1)
    tp: Any = key(
        AUTO, "tensor-parallel degrees to try; auto: every divisor of the number of devices of each node", least=1
    )
    pp: Any = key(AUTO, "pipeline depths to try; auto: every divisor of the number of devices", least=1)
    micro_batch_size: Any = key(
        AUTO, "samples per micro-batch to try; auto: every power of 2 up to the global batch", least=1
    )
    schedule: Any = key(
        AUTO,
        "pipeline schedules to try, which may have options, as in interleaved-1f1b:chunks=4; auto: all synchronous "
        "ones but synthesized, which is found by a search of its own, and seq1f1b, which needs a causal model",
        choices=tuple(SCHEDULES),
        options=True,
    )
    recompute: Any = key(
        ["none"], "recomputation to try: values that plan.recompute takes", choices=RECOMPUTE, least=0, most=1
    )
    partition: Any = key(["uniform"], "ways to cut the model into stages; auto: all", choices=STAGE_METHODS)
    placement: Any = key(
        AUTO,
        "ways to place ranks on the cluster; auto: on several nodes Megatron-LM's order, other orders, and AMP's "
        "tilings; on one node only Megatron-LM's, since all are alike there",
        choices=PLACEMENTS,
    )
    replicas: Any = key(
        ["equal"],
        "replicas of stages: equal, or uneven (each pipeline has more devices than stages; slower stages get more)",
        choices=REPLICAS,
    )
    sync: Any = key(
        ["lazy"],
        "when gradient syncs run: lazy: after all else; eager: beside compute; eager-opt: beside compute where that "
        "hides them",
        choices=SYNC,
    )
    shard_optimizer: Any = key([False], "ZeRO-1 or not, as in plan.shard_optimizer", choices=(False, True))
    sequence_parallel: Any = key(
        [False],
        "sequence parallelism or not, as in plan.sequence_parallel, where tp is 2 or more",
        choices=(False, True),
    )
    tensor_overlap: Any = key(
        ["none"], "values of plan.tensor_overlap to try where tp is 2 or more", choices=TENSOR_OVERLAPS
    )
    micro_batches: Any = key(
        AUTO,
        "numbers of micro-batches to try, per pipeline and iteration; auto: any; [1]: no gradient accumulation",
        least=1,
    )
    engine: Any = key(
        [AUTO3D],
        "runtimes that `auto3d sweep` measures: auto3d, or peers of it for comparison (docs/peers.md); auto: all",
        choices=ENGINES,
    )
    allow_idle_devices: bool = key(False, "also try plans that use fewer devices than the cluster has")
    max_trials: int = key(
        64, "most plans that a sweep runs; if there are more, it runs the fastest by prediction", least=1
    )
    algorithm: str = key(
        AUTO,
        "search algorithm of `auto3d plan` and `auto3d tune`; auto: exhaustive, which begins with what promises most; "
        "amp: AMP's own space and annealing (its paper's algorithm 1), whatever schedule, partition, placement and "
        "replicas say",
        choices=(AUTO, *ALGORITHMS),
    )
    candidates: int | None = key(
        None, "most candidates that a search looks at; none: 2000, or 500 if the algorithm is amp", least=1
    )
    simulations: int | None = key(None, "most plans that a search simulates; none: 500", least=1)
    order_seconds: float = key(
        ORDER_SECONDS,
        "seconds in which the order of each synthesized schedule is sought (docs/synthesis.md)",
        least=0.1,
        below=LARGEST_TIME_S,
    )
    seconds: float | None = key(
        None,
        "most seconds of processor time that a search takes, beside captures; none: any, so that equal recipes give "
        "equal plans on every machine",
        least=1e-6,
        below=LARGEST_TIME_S,
    )
    trials: int | None = key(
        None,
        "most trials that `auto3d tune` runs; none: 15, or 10 if the algorithm is amp; three in five try the best "
        "candidates, the others repeat the fastest of these, in turns, until their order is certain; amp repeats none",
        least=1,
    )
    seed: int = key(1, "seed of the search", least=0, below=LARGEST_INTEGER)


@dataclass
class PlanRecipe:
    dp: int = key(1, "data-parallel degree", least=1)
    tp: int = key(1, "tensor-parallel degree", least=1)
    pp: int = key(1, "pipeline depth", least=1)
    micro_batch_size: int = key(1, "samples per micro-batch", least=1)
    schedule: str = key("1f1b", "pipeline schedule", choices=tuple(SCHEDULES))
    schedule_options: dict[str, Any] = key(
        {},
        "options of the schedule, as in {chunks: 4, sync: eager}, or {file: FILE} for a synthesized one of a file",
        values=(int, str),
    )
    recompute: int | float | str = key(
        "none",
        "what stages compute again for the backward; a number: all but this fraction of the first stage's subgraphs, "
        "while the other stages keep the fraction that costs as much memory; auto: the largest fraction that fits into "
        "the devices' memory",
        choices=RECOMPUTE,
        least=0,
        most=1,
    )
    shard_optimizer: bool = key(
        False, "ZeRO-1: each rank that holds a copy of a parameter keeps only its own shard of the optimizer's state"
    )
    sequence_parallel: bool = key(
        False,
        "with tp of 2 or more: the ranks of a tensor-parallel group also split norms and dropout, along the sequence",
    )
    tensor_overlap: str = key(
        "none",
        "with tp of 2 or more, how its collectives are hidden; sub-pipelined: each micro-batch is computed in two "
        "halves, and the collective of one runs beside the compute of the other",
        choices=TENSOR_OVERLAPS,
    )
