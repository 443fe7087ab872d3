"""Recipe -> the settings of the engine, one function per group."""

from dataclasses import asdict, replace
from typing import Any

from auto3d.cluster import Accelerator, BusBandwidths, Cluster, ClusterError, Link, Node
from auto3d.cost.system_times import HOST, OWN, SystemTimes
from auto3d.cost.systems import SYSTEMS, System
from auto3d.cost.throughput import peak_flops_of
from auto3d.cost.training_options import TrainingOptions
from auto3d.cost.work import PRECISION_BYTES
from auto3d.plan import AUTO3D, Plan
from auto3d.runtime.emulated.settings import Emulation
from auto3d.runtime.optimizer.memory import state_copies, update_copies
from auto3d.runtime.settings import OptimizerSettings, ParameterGroup, TrainingSettings
from auto3d.search.algorithms import AMP, AMP_ITERATIONS, AMP_TRIALS
from auto3d.search.axes import AXES
from auto3d.search.planner_options import PlannerOptions
from auto3d.search.space import SearchSpace
from launch.recipe.cluster_schema import FIGURES, AcceleratorRecipe, CollectivesRecipe, LinkRecipe
from launch.recipe.load import LoadedRecipe
from launch.recipe.schema import EAGER_NORMS, FLOAT8, SCATTERED, UNFUSED, Recipe
from launch.recipe.schema_key import AUTO
from launch.recipe.search_schema import LINEAR

CANDIDATES, SIMULATIONS, TRIALS = 2000, 500, 15  # defaults of search.candidates, search.simulations, search.trials


def cluster(recipe: LoadedRecipe, precision: str | None = None) -> Cluster:
    """The recipe's cluster in ``precision`` (default: the precision that the recipe predicts for).

    No other function decides how much memory its devices have. Raises RecipeError where an accelerator is unknown or
    its file lacks the precision.
    """
    precision = precision or predicted_precision(recipe.values)
    values = recipe.values.cluster
    nodes = []
    for number, kind in enumerate([values, *values.more]):
        where = f"cluster.more[{number - 1}]" if number else "cluster"
        node = Node(
            devices=kind.devices_per_node,
            accelerator=_accelerator(recipe, f"{where}.accelerator", kind.accelerator, precision),
            inside=_link(kind.inside),
            outside=None if kind.outside is None else _link(kind.outside),
            bus=None if kind.collectives is None else _bus(recipe, f"{where}.collectives", kind.collectives),
        )
        nodes += [node] * kind.nodes
    try:
        machine = Cluster(nodes=tuple(nodes), device=values.device)
    except ClusterError as error:
        raise recipe.error("cluster", str(error)) from None
    machine = replace(machine, amp_mesh=_amp_mesh(recipe, machine.devices))
    return machine if values.memory_gib is None else with_memory(machine, values.memory_gib * 2**30)


def _amp_mesh(recipe: LoadedRecipe, devices: int) -> tuple[int, int] | None:
    match recipe.values.search.amp_mesh:
        case []:
            return None
        case [rows, columns] if rows * columns == devices:
            return rows, columns
    problem = f"found {recipe.values.search.amp_mesh}; it takes [rows, columns], rows × columns = {devices} devices"
    raise recipe.error("search.amp_mesh", problem)


def known_peak_flops(recipe: LoadedRecipe, plan: Plan, precision: str) -> float | None:
    """Sum of the peaks of the devices that ``plan`` uses, in FLOPs per second.

    None where the recipe names no accelerator, or where an accelerator's file has no peak in ``precision``.
    """
    known = cluster_of_known_peaks(recipe, precision)
    return None if known is None else peak_flops_of(plan, known)


def cluster_of_known_peaks(recipe: LoadedRecipe, precision: str) -> Cluster | None:
    """The recipe's cluster if the peak of each of its accelerators in ``precision`` is known, else None."""
    if any(figures is None or precision not in figures.peak_tflops for figures in accelerator_figures(recipe)):
        return None
    return cluster(recipe, precision)


def accelerator_figures(recipe: LoadedRecipe) -> list[AcceleratorRecipe | None]:
    """The figures of the accelerator of each kind of nodes; None for a kind that names none."""
    figures: list[AcceleratorRecipe | None] = []
    for number, kind in enumerate((recipe.values.cluster, *recipe.values.cluster.more)):
        key = f"cluster.more[{number - 1}].accelerator" if number else "cluster.accelerator"
        figures.append(None if kind.accelerator is None else recipe.accelerator(key, kind.accelerator)[1])
    return figures


def with_memory(machine: Cluster, memory_bytes: float) -> Cluster:
    """``machine`` with ``memory_bytes`` as the memory that a process may fill on each device."""
    nodes = (replace(node, accelerator=replace(node.accelerator, memory_bytes=memory_bytes)) for node in machine.nodes)
    return replace(machine, nodes=tuple(nodes))


def _link(values: LinkRecipe) -> Link:
    assert values.gbit_per_s is not None  # load() has filled it in
    assert values.latency_us is not None
    return Link(latency_s=values.latency_us / 1e6, bandwidth=values.gbit_per_s * 1e9 / 8, lanes=values.lanes)


def _bus(recipe: LoadedRecipe, where: str, values: CollectivesRecipe) -> BusBandwidths:
    try:
        return BusBandwidths(
            size=1e6 * values.megabytes,
            nodes=tuple(values.nodes),
            all_reduce=tuple(1e9 * value for value in values.all_reduce_gb_per_s),
            all_gather=tuple(1e9 * value for value in values.all_gather_gb_per_s),
        )
    except ClusterError as error:
        raise recipe.error(where, str(error)) from None


def _accelerator(recipe: LoadedRecipe, where: str, name: str | None, precision: str) -> Accelerator:
    if name is None:
        if recipe.values.prediction.precision == FLOAT8:
            raise recipe.error(
                "prediction.precision", f"found {FLOAT8!r}, but {where} is null; it takes an accelerator"
            )
        return Accelerator()
    file, values = recipe.accelerator(where, name)
    float8 = values.float8_tflops
    if float8 is None and recipe.values.prediction.precision == FLOAT8:
        raise recipe.error("prediction.precision", f"found {FLOAT8!r}; {file} has no float8_tflops")
    if precision not in values.peak_tflops:
        known = ", ".join(values.peak_tflops) or "none"
        name = "training" if recipe.values.prediction.precision == AUTO else "prediction"
        raise recipe.error(
            f"{name}.precision", f"found {precision!r}; {file} has peak_tflops for {known}: it takes one of these"
        )
    given = {name: (getattr(values, key), units) for name, (key, units) in FIGURES.items()}
    figures: dict[str, Any] = {name: None if value is None else value / units for name, (value, units) in given.items()}
    accelerator = Accelerator(
        name=file.stem,
        peak_flops=values.peak_tflops[precision] * 1e12,
        float8_flops=None if float8 is None else float8 * 1e12,
        memory_bandwidth=values.memory_gb_per_s * 1e9,
        memory_bytes=None if values.memory_gib is None else values.memory_gib * 2**30,
        capability=values.compute_capability,
        matrix_efficiency=_in_precision(values.matrix_efficiency, precision),
        half_flops=_in_precision(values.half_gflops, precision) * 1e9,
        unaligned=tuple(
            (size, tflops * 1e12)
            for size, tflops in ((2, values.tflops_at_2_bytes), (4, values.tflops_at_4_bytes))
            if tflops is not None
        ),
        **figures,
    )
    times = predicted_times(recipe.values)
    if values.fitted_to == recipe.values.prediction.system or (values.fitted_to and times.launch_s is None):
        return accelerator  # the host of this system on this device, or of a device with launches, where this has none
    return replace(accelerator, **{name: seconds for name in HOST if (seconds := getattr(times, name)) is not None})


def _in_precision(value: float | dict[str, float], precision: str) -> float:
    return value[precision] if isinstance(value, dict) else value


def predicted_precision(recipe: Recipe) -> str:
    """The precision that times and memory are predicted for; bfloat16 for float8, in which only some products are."""
    if recipe.prediction.precision == FLOAT8:
        return "bfloat16"
    return recipe.training.precision if recipe.prediction.precision == AUTO else recipe.prediction.precision


def training(recipe: Recipe) -> TrainingOptions:
    """The training settings that the cost model needs."""
    prediction = recipe.prediction
    return TrainingOptions(
        precision=predicted_precision(recipe),
        autocast=recipe.training.precision != "float32" and prediction.system == AUTO3D,
        sync_bytes=PRECISION_BYTES[prediction.sync_precision],
        moments=0.0 if recipe.training.offload_optimizer else state_copies(optimizer_settings(recipe)),
        overlap=prediction.overlap,
        scattered_messages=prediction.messages == SCATTERED,
        recompute_ends=prediction.recompute_ends,
        times=predicted_times(recipe),
        reserve_bytes=prediction.reserve_gib * 2**30,
        deterministic=recipe.training.deterministic,
        system=predicted_system(recipe),
        backward_makes_gradients=predicted_precision(recipe) == recipe.training.precision
        and prediction.system == AUTO3D,
        update_copies=(0, 0)
        if recipe.training.offload_optimizer
        else update_copies(optimizer_settings(recipe), recipe.cluster.device),
        sums_have_copies=recipe.cluster.device == "cpu",
    )


def predicted_system(recipe: Recipe) -> System | None:
    """The system that is predicted; None: this project's runtime."""
    prediction = recipe.prediction
    system = SYSTEMS.get(prediction.system)
    if system is None:
        return None
    if prediction.attention == UNFUSED:
        system = replace(system, fused_attention=False)
    if prediction.keeps_gathered is not None:
        system = replace(system, keeps_gathered=prediction.keeps_gathered)
    if prediction.norms == EAGER_NORMS:
        system = replace(system, fused_norms=False)
    return system


def predicted_times(recipe: Recipe) -> SystemTimes:
    """The time beside a model's operators of the system that is predicted."""
    system = predicted_system(recipe)
    return OWN if system is None else system.times


def optimizer_settings(recipe: Recipe) -> OptimizerSettings:
    training = recipe.training
    first, second = training.betas  # load() has checked that there are two
    return OptimizerSettings(
        optimizer=training.optimizer,
        learning_rate=training.learning_rate,
        arguments=dict(training.optimizer_arguments),
        weight_decay=training.weight_decay,
        exempt=tuple(training.weight_decay_exempt),
        groups=tuple(
            ParameterGroup(
                names=tuple(group.names),
                dimensions=group.dimensions,
                optimizer=group.optimizer,
                arguments=dict(group.optimizer_arguments),
                learning_rate=group.learning_rate,
                weight_decay=group.weight_decay,
            )
            for group in training.parameter_groups
        ),
        momentum=training.momentum,
        betas=(first, second),
        offload=training.offload_optimizer,
        learning_rate_schedule=training.learning_rate_schedule,
        learning_rate_arguments=dict(training.learning_rate_arguments),
        warmup_iterations=training.warmup_iterations,
        clip_norm=training.clip_norm,
        clip_value=training.clip_value,
        clip_ratio=training.clip_ratio,
    )


def training_settings(recipe: Recipe, *, iterations: int) -> TrainingSettings:
    training = recipe.training
    return TrainingSettings(
        iterations=iterations,
        optimizer=optimizer_settings(recipe),
        device=device(recipe),
        threads_per_rank=training.threads_per_rank,
        timeout_s=training.timeout_s,
        precision=training.precision,
        compile=training.compile,
        tf32=training.tf32,
        deterministic=training.deterministic,
        loss_mean=training.loss_mean,
        emulation=emulation(recipe),
    )


def device(recipe: Recipe) -> str:
    """The type of device that a rank runs on: emulated devices are CPU processes, whatever they stand for."""
    return "cpu" if recipe.training.compute == "emulated" else recipe.cluster.device


def emulation(recipe: Recipe) -> Emulation | None:
    """The times and sizes that devices emulate; None if devices are real."""
    if recipe.training.compute == "real":
        return None
    values = asdict(recipe.emulation) if recipe.emulation else {}
    return Emulation(**{name: tuple(value) if isinstance(value, list) else value for name, value in values.items()})


def trial_limit_s(recipe: Recipe) -> float:
    """Seconds that the runs of a trial may take together: a second one logs its communication."""
    return recipe.launch.trial_timeout_s * (2 if recipe.measure.communication else 1)


def search_space(recipe: Recipe) -> SearchSpace:
    axes = {name: getattr(recipe.search, name) for name in AXES}
    micro_batches, idle = recipe.search.micro_batches, recipe.search.allow_idle_devices
    return SearchSpace(**axes, micro_batches=micro_batches, allow_idle_devices=idle)


def planner_options(recipe: Recipe) -> PlannerOptions:
    search = recipe.search
    return PlannerOptions(
        rannc_blocks=search.rannc_blocks,
        rannc_smallest_micro_batch=search.rannc_smallest_micro_batch,
        amp_cooling=None if search.amp_cooling == LINEAR else float(search.amp_cooling),
    )


def most_candidates(recipe: Recipe) -> int:
    """Most candidates that a search looks at: search.candidates, or the default of its algorithm."""
    return recipe.search.candidates or (AMP_ITERATIONS if recipe.search.algorithm == AMP else CANDIDATES)


def most_simulations(recipe: Recipe) -> int:
    """Most plans that a search simulates: search.simulations, or its default."""
    return recipe.search.simulations or SIMULATIONS


def most_trials(recipe: Recipe) -> int:
    """Most trials of ``auto3d tune``: search.trials, or the default of its algorithm."""
    return recipe.search.trials or (AMP_TRIALS if recipe.search.algorithm == AMP else TRIALS)
