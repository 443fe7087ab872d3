"""The keys of a search space, and of the one plan of a training: most are axes of a plan."""

from dataclasses import dataclass, make_dataclass
from typing import Any

from auto3d.partition.request import BLOCKS
from auto3d.search.algorithms import ALGORITHMS
from auto3d.search.axes import AXES, TYPES, PlanAxis
from auto3d.search.space import ORDER_SECONDS
from launch.recipe.schema_key import AUTO, LARGEST_INTEGER, LARGEST_TIME_S, key

LINEAR = "linear"  # AMP's temperature falls to 0 at its last step


def _searched(axis: PlanAxis) -> Any:
    """The key search.NAME: a list of values, or auto."""
    default = AUTO if axis.tried == AUTO else list(axis.tried)
    return key(default, axis.trying, choices=axis.takes, options=axis.options, least=axis.least, most=axis.most)


def _planned(axis: PlanAxis, kind: type) -> Any:
    """The key plan.NAME: one value."""
    default = 1 if axis.default is None else axis.default
    words = () if kind is bool else axis.takes
    return key(default, axis.meaning, choices=words, least=axis.least, most=axis.most)


_SearchAxes: Any = make_dataclass("_SearchAxes", [(name, Any, _searched(axis)) for name, axis in AXES.items()])
_PlanAxes: Any = make_dataclass(
    "_PlanAxes", [(name, TYPES[name], _planned(axis, TYPES[name])) for name, axis in AXES.items() if axis.meaning]
)


@dataclass
class SearchRecipe(_SearchAxes):
    micro_batches: Any = key(
        AUTO,
        "numbers of micro-batches to try, per pipeline and iteration; auto: any; [1]: no gradient accumulation",
        least=1,
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
    planners: list[str] = key(
        [],
        "planners whose own plans a sweep runs as well, each as a row with its name: the plan that each of these "
        "algorithms finds alone",
        choices=tuple(ALGORITHMS),
    )
    subgraphs: int | None = key(
        None,
        "subgraphs that the model is divided into, Merak's k, between which stages begin and end; none: as many as "
        "possible",
        least=1,
    )
    rannc_blocks: int = key(
        BLOCKS, "blocks of which RaNNC makes stages, its k; more cost its search time and leave it more cuts", least=1
    )
    rannc_smallest_micro_batch: int = key(
        1, "fewest samples that RaNNC gives a replica in a micro-batch; batch statistics may need 2", least=1
    )
    amp_mesh: list[int] = key(
        [],
        "device mesh that AMP's placements (horizontal, vertical) tile, as [rows, columns] of ranks in their order; "
        "none: each row is a node",
        least=1,
    )
    amp_cooling: float | str = key(
        LINEAR,
        "how the temperature of AMP's annealing falls from 1 second; linear: to 0 in its last step; a number: by this "
        "factor in each step",
        choices=(LINEAR,),
        least=0,
        most=1,
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
class PlanRecipe(_PlanAxes):
    schedule_options: dict[str, Any] = key(
        {},
        "options of the schedule, as in {chunks: 4, sync: eager}, or {file: FILE} for a synthesized one of a file",
        values=(int, str),
    )
    cuts: list[int] = key(
        [],
        "bounds of the stages in subgraphs of the model, from 0 to their number, as in [0, 13, 25]; none: partition "
        "chooses them",
        least=0,
    )
    kept: list[float] = key(
        [],
        "with recompute: full, the fraction of its subgraphs that each stage does not recompute, as in [0.5, 1]",
        least=0,
        most=1,
    )
