"""The formulas of Chimera's tables 2 and 3 for bubbles and memory, beside simulated schedules and predicted bytes."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from auto3d.cluster import Cluster, Node, place_ranks
from auto3d.cost.layers import Layer, work_of_layers
from auto3d.cost.model import CostModel
from auto3d.cost.training_options import TrainingOptions
from auto3d.errors import InputError
from auto3d.plan import Plan, stages_between
from auto3d.schedule import build_schedule
from auto3d.schedule.in_flight import peak_activations
from auto3d.schedule.weight_versions import weight_copies
from auto3d.simulate.costs import uniform
from auto3d.simulate.idle import bubble_ratio, steady_state
from auto3d.simulate.simulate import simulate
from launch.papers.row import Row

MIB = 2**20
GRADIENT_AND_MOMENTS = 12  # bytes of each parameter under AdamW, beside the 4 of each version of the weight
# One layer of BERT-large (Devlin et al. 2019): its parameters; the elements that it saves are a round figure.
PARAMETERS, SAVED = 12.6e6, 4e6


@dataclass(frozen=True, kw_only=True)
class Formulas:
    """A row of a table: the bubble ratio, and (least, most) of weights and activations over the workers.

    Weights are in M_theta, activations in M_a, the bytes of one stage. ``backward`` is the time of a backward, in
    forwards, at which the bubble ratio holds. ``models`` is the number of model copies, each with its gradients.
    """

    bubble: float
    weights: tuple[float, float]
    activations: tuple[float | None, float]  # None: the paper does not give it
    backward: float = 2.0
    models: int = 1
    schedule: str
    options: Mapping[str, int | str]


def _table_2(d: int, n: int) -> dict[tuple[str, str], Formulas]:
    """(synchronous or not, scheme) -> its formulas at depth ``d`` with ``n`` micro-batches."""
    flushed = (d - 1) / (n + d - 1)
    chimera = Formulas(
        bubble=(d - 2) / (2 * n + d - 2),
        weights=(2, 2),
        activations=(d / 2 + 1, d),
        backward=1.0,
        models=2,
        schedule="chimera",
        options={},
    )
    many: dict[str, int | str] = {"iterations": 8}
    return {
        ("asynchronous", "PipeDream"): Formulas(
            bubble=0.0, weights=(1, d), activations=(1, d), schedule="pipedream", options=many
        ),
        ("asynchronous", "PipeDream-2BW"): Formulas(
            bubble=0.0, weights=(2, 2), activations=(1, d), schedule="pipedream-2bw", options=many
        ),
        ("synchronous", "GPipe"): Formulas(
            bubble=flushed, weights=(1, 1), activations=(n, n), schedule="gpipe", options={}
        ),
        ("synchronous", "GEMS"): Formulas(
            bubble=(d - 1) / (d + 0.5), weights=(2, 2), activations=(1, 1), models=2, schedule="gems", options={}
        ),
        ("synchronous", "DAPPLE"): Formulas(
            bubble=flushed, weights=(1, 1), activations=(1, d), schedule="1f1b", options={}
        ),
        ("synchronous", "Chimera, B = F"): chimera,
        # The parts of a micro-batch are the micro-batches of the formula. The paper says that halving needs no more
        # activations than Chimera, and does not give the least.
        ("synchronous", "Chimera halving, B = 2 F"): replace(
            chimera,
            bubble=(d - 2) / (4 * n + d - 2),
            activations=(None, d),
            backward=2.0,
            options={"scale": "halving"},
        ),
    }  # fmt: skip


def _table_3(d: int, n: int) -> dict[tuple[str, str], Formulas]:
    """(synchronous, number of pipelines) -> the formulas of Chimera with 2f pipelines."""
    return {
        ("synchronous", f"{2 * f} pipelines"): Formulas(
            bubble=(d - 2 * f) / (2 * f * n + d - 2 * f),
            weights=(2 * f, 2 * f),
            activations=(d - d / (2 * f) + 1, d),
            backward=1.0,
            models=2 * f,
            schedule="chimera",
            options={"pipes": 2 * f},
        )
        for f in range(1, d // 2 + 1)
        if d // 2 % f == 0
    }


TABLES: dict[int, Callable[[int, int], dict[tuple[str, str], Formulas]]] = {2: _table_2, 3: _table_3}


def schedule_formulas(*, tell: Callable[[str], None], table: int, depths: Sequence[int]) -> Iterable[Row]:
    """The rows of Chimera's ``table`` at each of ``depths``, with as many micro-batches as stages.

    Each setting has the row ``formula`` and the row ``ours``: bubbles by simulation, weights and activations counted
    from the order of operations, and the bytes of the fullest worker by the cost model, for equal stages.
    """
    if table not in TABLES:
        raise InputError(
            f"arguments of schedule-formulas: table: found {table!r}; it takes {', '.join(map(str, TABLES))}"
        )
    for depth in depths:
        for (kind, scheme), formulas in TABLES[table](depth, depth).items():
            tell(f"table {table}: {scheme}, D = {depth}")
            setting = (kind, scheme, f"D = N = {depth}")
            yield Row(setting=setting, system="formula", values=dict(_by_formula(formulas)))
            yield Row(setting=setting, system="ours", values=dict(_ours(formulas, depth)), plan=formulas.schedule)


def _by_formula(formulas: Formulas) -> Iterator[tuple[str, float]]:
    yield "bubble", formulas.bubble
    yield "busy", 1 - formulas.bubble
    yield "weights_least", formulas.weights[0]
    yield "weights_most", formulas.weights[1]
    if formulas.activations[0] is not None:
        yield "activations_least", formulas.activations[0]
    yield "activations_most", formulas.activations[1]
    # Weights and activations are largest on the same worker: the first, or any where all hold equally many.
    state = 4 * formulas.weights[1] + GRADIENT_AND_MOMENTS * formulas.models
    yield "peak_mib", (PARAMETERS * state + 4 * SAVED * formulas.activations[1]) / MIB


def _ours(formulas: Formulas, depth: int) -> Iterator[tuple[str, float]]:
    schedule = build_schedule(formulas.schedule, devices=depth, micro_batches=depth, **formulas.options)
    timeline = simulate(schedule, uniform(schedule, backward=formulas.backward))
    steady = steady_state(timeline)
    bubble = bubble_ratio(timeline) if steady is None else steady.bubble_ratio
    yield "bubble", bubble
    yield "busy", 1 - bubble
    weights, activations = weight_copies(schedule), peak_activations(schedule)
    yield "weights_least", min(weights)
    yield "weights_most", max(weights)
    yield "activations_least", min(activations)
    yield "activations_most", max(activations)
    # A micro-batch has two samples, so that halving can divide it.
    layers = [Layer(parameters=PARAMETERS, saved=SAVED / 2)] * depth
    model = CostModel(
        Cluster(nodes=(Node(devices=depth),), device="cuda"),
        TrainingOptions(),
        lambda samples, share: work_of_layers(layers, samples, share.tp, precision="float32"),
    )
    plan = Plan(
        graph="",
        dp=1,
        tp=1,
        pp=depth,
        global_batch=2 * depth,
        micro_batch_size=2,
        schedule=formulas.schedule,
        schedule_options=dict(formulas.options),
        stages=stages_between(range(depth + 1)),
        placement=place_ranks(dp=1, pp=depth, tp=1),
        seed=0,
    )
    yield "peak_mib", max(model.memory.of(plan)) / MIB
