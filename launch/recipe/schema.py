"""The schema of a recipe: every key with its default, its meaning and unit, and what it accepts."""

from collections.abc import Sequence
from dataclasses import dataclass, field, is_dataclass
from typing import Any

from auto3d.partition.methods import STAGE_METHODS
from auto3d.schedule import SCHEDULES
from auto3d.schedule.options import SYNC
from auto3d.search.algorithms import ALGORITHMS
from auto3d.search.placement import PLACEMENTS
from auto3d.search.space import REPLICAS

AUTO = "auto"

# Beyond these, planning would take longer than any run: it lists every micro-batch, and every divisor of the devices.
LARGEST_BATCH, LARGEST_NODES, LARGEST_NODE = 10**5, 10**4, 10**3
LARGEST_INTEGER = 2**63  # of a tensor
LARGEST_TIME_S = 10**8
TOKEN_KINDS = ("tokens", "next-tokens")
INPUT_KEYS = {  # kind of an input -> the keys that it takes
    **dict.fromkeys(TOKEN_KINDS, ("prefix", "prefix_length")),
    "integers": ("shape", "low", "high", "prefix", "prefix_length"),
    "normal": ("shape",),
    "constant": ("shape", "value"),
    "mask": ("shape", "count"),
}
RECOMPUTE = {"choices": ("none", "full", AUTO), "least": 0, "most": 1}


def key(
    default: Any,
    meaning: str,
    *,
    choices: Sequence[str] = (),
    least: float | None = None,
    below: float | None = None,
    per_stage: type | None = None,
    most: float | None = None,
    values: Sequence[type] = (),
    options: bool = False,
) -> Any:
    """A key of the schema. A number, or each of a list, is at least ``least``, at most ``most``, below ``below``.

    With ``choices`` and ``most`` it is one of these words or such a number; with ``options``, what follows a colon in
    such a word is looked at later. ``values`` are the types of a mapping's.
    ``per_stage``: it takes one number, of that type, or a list of them with one for each stage.
    """
    limits = {"least": least, "below": below, "most": most}
    kinds = {"values": tuple(values), "per_stage": per_stage, "options": options}
    metadata = {"meaning": meaning, "choices": tuple(choices), **kinds, **limits}
    if isinstance(default, (list, dict)):
        return field(default_factory=default.copy, metadata=metadata)
    if is_dataclass(default):  # the schema of a group inside this one
        return field(default_factory=default, metadata=metadata)
    return field(default=default, metadata=metadata)


@dataclass
class LayerRecipe:
    count: int = key(1, "equal layers that follow each other", least=1, below=LARGEST_BATCH)
    parameters: float = key(0.0, "elements of its weights", least=0)
    tied: float = key(0.0, "elements of more weights, which are the first layer's", least=0)
    flops: float = key(0.0, "of its forward, for one sample", least=0)
    products: int = key(1, "matrix products that these FLOPs are in", least=1)
    traffic: float = key(
        0.0, "elements that its forward reads and writes beside matrix products, for one sample", least=0
    )
    undivided: float = key(0.0, "elements of that traffic which tensor parallelism does not divide", least=0)
    saved: float = key(0.0, "elements that wait for its backward, for one sample", least=0)
    output: float = key(0.0, "elements that it gives to the next layer, for one sample", least=0)
    reductions: int = key(
        0, "all-reduces of its output in a forward under tensor parallelism, and in a backward", least=0
    )


@dataclass
class ModelRecipe:
    architecture: str | None = key(None, "a model class of transformers, such as GPT2LMHeadModel")
    config: dict[str, Any] = key({}, "keys of that class's configuration; the others keep its defaults")
    factory: str | None = key(None, "instead of architecture: package.module:function that makes an nn.Module")
    arguments: dict[str, Any] = key({}, "keyword arguments of the factory")
    forward: dict[str, Any] = key(
        {},
        "plain keyword arguments of the model's forward beside data.inputs, as in {return_loss: true}",
        values=(bool, int, float, str),
    )
    weights: str | None = key(None, "a safetensors file with initial weights; none: drawn from training.seed")
    layers: str | None = key(None, "instead of both, to predict alone: a CSV file of measured layers (docs/cost.md)")
    layers_of: str | None = key(None, "of layers: whose rows of the column model")
    layer_sizes: list[LayerRecipe] = key([], "of layers: what they hold and compute, in order")


@dataclass
class InputRecipe:
    kind: str = key(
        "tokens",
        "tokens, the same tokens one later, uniform integers, normal numbers, one value everywhere, or booleans with a "
        "fixed number of true ones (docs/models.md)",
        choices=tuple(INPUT_KEYS),
    )
    shape: list[int] = key([], "of all but tokens: sizes of one sample", least=1, below=LARGEST_INTEGER)
    low: int = key(0, "of integers: they are at least this", least=-LARGEST_INTEGER, below=LARGEST_INTEGER)
    high: int = key(2, "of integers: they are below this", least=1, below=LARGEST_INTEGER)
    value: bool | int | float = key(1, "of constant: its type is the input's")
    count: int = key(1, "of mask: so many are true", least=0, below=LARGEST_INTEGER)
    prefix: int = key(
        0, "of tokens and integers: the first are this, as in the id of an image's tokens, or -100 for no label",
        least=-LARGEST_INTEGER, below=LARGEST_INTEGER,
    )  # fmt: skip
    prefix_length: int = key(0, "of tokens and integers: how many are prefix", least=0, below=LARGEST_INTEGER)


@dataclass
class DataRecipe:
    source: str = key("text", "what tokens are: bytes of files, or random", choices=("text", "synthetic"))
    files: list[str] = key([], "text: files to read, * allowed; none: the source of Python's standard library")
    sequence_length: int = key(128, "tokens per sample", least=1, below=LARGEST_INTEGER)
    vocabulary_size: int = key(256, "synthetic: tokens are below this", least=1, below=LARGEST_INTEGER)
    inputs: dict[str, InputRecipe] = key({}, "the model's inputs by name; none: input_ids and labels, both tokens")


@dataclass
class LinkRecipe:
    gbit_per_s: float = key(100.0, "bandwidth of one lane in each direction", least=1e-6)
    latency_us: float = key(20.0, "microseconds of a message", least=0)
    lanes: int | None = key(None, "that the devices of a node share; none: one for each device", least=1)


@dataclass
class NodesRecipe:
    nodes: int = key(1, "machines", least=1, below=LARGEST_NODES)
    devices_per_node: int = key(
        4, "processes per machine: one per GPU, or as many as a CPU should run", least=1, below=LARGEST_NODE
    )
    accelerator: str | None = key(None, "the kind of device: a file of recipes/accelerators/; none: round figures")
    inside: LinkRecipe = key(LinkRecipe, "links between the devices of a node")
    outside: LinkRecipe | None = key(LinkRecipe, "a node's links to the others; none: it has none")


@dataclass
class AcceleratorRecipe:
    """A file of recipes/accelerators/."""

    peak_tflops: dict[str, float] = key({}, "TFLOP/s of matrix products by precision")
    memory_gib: float | None = key(None, "GiB that a process may fill; none: not known", least=0.001)
    memory_gb_per_s: float = key(700.0, "bandwidth of its memory", least=1e-6)
    matrix_efficiency: float = key(0.6, "share of the peak that large matrix products reach", least=0.001, most=1)
    half_gflops: float = key(1.0, "a matrix product as small as this takes twice its time at that share", least=0)
    memory_efficiency: float = key(0.75, "share of the memory's bandwidth that is reached", least=0.001, most=1)
    launch_us: float = key(10.0, "microseconds from the launch of one operation to that of the next", least=0)
    collective_launch_us: float = key(
        10.0, "of a collective in a stage, for each other rank that it waits for", least=0
    )
    micro_batch_us: float = key(0.0, "of the host for each micro-batch of a stage, beside its operations", least=0)
    iteration_ms: float = key(0.0, "milliseconds of each iteration, whatever its size", least=0)


@dataclass
class ClusterRecipe(NodesRecipe):
    more: list[NodesRecipe] = key([], "further nodes, of other kinds")
    device: str = key("cpu", "what a process computes on", choices=("cpu", "cuda"))
    memory_gib: float | None = key(
        None,
        "GiB that a process may fill on each device: plans that need more are refused; none: memory_gib of each node's "
        "accelerator, which is what a process may fill and not the data sheet's",
        least=0.001,
    )


@dataclass
class PredictionRecipe:
    precision: str = key("float32", "of weights and activations", choices=("float32", "float16", "bfloat16"))
    sync_precision: str = key("float32", "of the gradient all-reduce", choices=("float32", "float16", "bfloat16"))
    fused: bool = key(False, "elementwise operations that follow each other are one kernel, as in Megatron-LM")
    overlap: bool = key(True, "messages travel beside compute")
    recompute_ends: bool = key(True, "full recomputation takes in embedding and head; Megatron-LM's does not")
    columns: dict[str, str] = key(
        {},
        "other names that files of candidates have for our columns, as in {hidden: model.config.n_embd}",
        values=(str,),
    )
    profile: str = key(
        AUTO,
        "measured times to use: auto: profiles/<cluster>-<recipe>.json where `tune` measured it, else "
        "profiles/<cluster>.json where `auto3d profile` did; none; or a file",
    )
    method: str = key("simulated", "how the time is found on these costs", choices=("simulated", "amp", "chimera"))


@dataclass
class TrainingRecipe:
    compute: str = key(
        "real",
        "what operations do: compute, or only take the time that the group emulation gives them",
        choices=("real", "emulated"),
    )
    global_batch: int = key(16, "samples per iteration, over all replicas", least=1, below=LARGEST_BATCH)
    iterations: int = key(20, "of `auto3d train`", least=1)
    check_capture: bool = key(
        True,
        "before train, sweep and tune: compare loss and gradients of the captured model with the model itself on one "
        "micro-batch, where that takes at most 1 GiB and 0.1 TFLOP; once per capture",
    )
    checkpoint_every: int | None = key(
        None,
        "iterations of `auto3d train` between two, and one at its end; each rank writes its share within timeout_s; "
        "none: only when SLURM asks it to end",
        least=1,
    )
    optimizer: str = key("adamw", "the optimizer", choices=("adamw", "sgd"))
    learning_rate: float = key(1e-3, "the highest of the schedule", least=0)
    learning_rate_schedule: str = key(
        "constant", "how it falls after the warm-up", choices=("constant", "linear", "cosine")
    )
    warmup_iterations: int = key(0, "iterations in which the rate rises linearly from 0", least=0)
    weight_decay: float = key(0.0, "decay of every parameter", least=0)
    momentum: float = key(0.9, "of sgd", least=0)
    betas: list[float] = key([0.9, 0.999], "the two of adamw", least=0, below=1)
    clip_norm: float = key(
        1.0, "largest norm of all gradients together; 0: no clipping, as asynchronous schedules need", least=0
    )
    seed: int = key(1, "of weights, data order and dropout", least=0, below=LARGEST_INTEGER)
    tf32: bool = key(
        False,
        "on GPUs, matrix products and convolutions both round their float32 inputs to 10 bits of mantissa: faster; "
        "false: neither does",
    )
    deterministic: bool = key(
        False,
        "only algorithms that give the same bits each time, so that GPUs too repeat a run to the bit: slower; an "
        "operation that has none is refused",
    )
    threads_per_rank: int = key(1, "threads of a CPU process's arithmetic", least=1, below=LARGEST_NODE)
    timeout_s: float = key(
        120.0, "seconds that a process waits for another before it gives up", least=1, below=LARGEST_TIME_S
    )


_TIME = {"least": 0, "below": LARGEST_TIME_S, "per_stage": float}
_SIZE = {"least": 1, "below": LARGEST_INTEGER, "per_stage": int}


@dataclass
class EmulationRecipe:
    forward_s: Any = key(None, "seconds of a stage's forward of one micro-batch; none: by the cost model", **_TIME)
    backward_s: Any = key(None, "of its backward; none: the sum of its halves, or by the cost model", **_TIME)
    backward_input_s: Any = key(None, "of the half for the gradient of the input; none: half of the backward", **_TIME)
    backward_weight_s: Any = key(None, "of the half for those of the weights; none: half of the backward", **_TIME)
    recompute_s: Any = key(None, "of running the forward again; none: as the forward", **_TIME)
    send_bytes: Any = key(None, "of what a stage sends to a later one for one micro-batch; none: true size", **_SIZE)
    sync_bytes: Any = key(None, "of each gradient all-reduce that a stage takes part in; none: true size", **_SIZE)


@dataclass
class SearchRecipe:
    dp: Any = key(AUTO, "data-parallel degrees: a list, or auto: every divisor of the devices", least=1)
    tp: Any = key([1], "tensor-parallel degrees: a list, or auto; only 1 can run yet, others are predicted", least=1)
    pp: Any = key(AUTO, "pipeline depths: a list, or auto: every divisor of the devices", least=1)
    micro_batch_size: Any = key(AUTO, "samples: a list, or auto: every power of 2 up to the global batch", least=1)
    schedule: Any = key(
        AUTO,
        "pipeline schedules: a list, or auto: all synchronous ones; interleaved-1f1b:chunks=4 has options of its own",
        choices=tuple(SCHEDULES),
        options=True,
    )
    recompute: Any = key(["none"], "what stages recompute: a list of what plan.recompute takes", **RECOMPUTE)
    partition: Any = key(["uniform"], "how stages are cut: a list, or auto: all ways", choices=STAGE_METHODS)
    placement: Any = key(
        ["megatron"], "how ranks lie on the cluster: a list, or auto: Megatron-LM's order, others, AMP's tilings",
        choices=PLACEMENTS,
    )  # fmt: skip
    replicas: Any = key(
        ["equal"],
        "of stages: equal, uneven (more devices than stages in each pipeline, the slower stages get more of them)",
        choices=REPLICAS,
    )
    sync: Any = key(["lazy"], "when gradient syncs run: after all else, or beside compute", choices=SYNC)
    shard_optimizer: Any = key([False], "ZeRO-1, as in plan.shard_optimizer", choices=(False, True))
    allow_idle_devices: bool = key(False, "also try plans that use fewer devices than the cluster has")
    max_trials: int = key(64, "plans that a sweep runs at most: of more, the fastest by prediction", least=1)
    algorithm: str = key(
        AUTO,
        "how `plan` and `tune` search; auto: exhaustive where the space is small, else annealing",
        choices=(AUTO, *ALGORITHMS),
    )
    candidates: int = key(2000, "that a search estimates at most", least=1)
    seconds: float = key(60.0, "of processor time that a search takes at most", least=0.1, below=LARGEST_TIME_S)
    trials: int = key(
        15,
        "that `tune` runs at most: three in five of the best candidates, the others again of the fastest of these, in "
        "turns, until their order is certain",
        least=1,
    )
    seed: int = key(1, "of the search", least=0, below=LARGEST_INTEGER)


@dataclass
class MeasureRecipe:
    warmup_iterations: int = key(2, "iterations of a trial that are not measured", least=0)
    iterations: int = key(5, "iterations of a trial that are measured", least=1)


@dataclass
class LaunchRecipe:
    executor: str = key(
        AUTO,
        "where trials and trainings run; auto: as jobs of SLURM if sinfo answers and we are in no job, else here",
        choices=(AUTO, "slurm", "local"),
    )
    concurrent_trials: int = key(
        1, "trials at a time, on GPUs of their own; more than 1 disturbs the timings on one machine", least=1
    )
    trial_timeout_s: float = key(600.0, "seconds after which a trial is ended", least=1, below=LARGEST_TIME_S)
    attempts: int = key(3, "times that a trial is started before `resume` leaves it as it failed", least=1)
    # of SLURM; docs/slurm.md
    partition: str | None = key(None, "the queue; none: the cluster's default")
    account: str | None = key(None, "whom the time is charged to")
    qos: str | None = key(None, "quality of service")
    constraint: str | None = key(None, "features that the nodes must have, as in a100&nvlink")
    reservation: str | None = key(None, "a reservation to run in")
    nodelist: str | None = key(None, "nodes to run on, as in n[1-4]")
    exclude: str | None = key(None, "nodes not to run on")
    gpus_per_node: str | None = key(None, "as in a100:4; none: devices_per_node if they are cuda, unless gres is given")
    gres: str | None = key(None, "generic resources of a node, as in gpu:a100:4, instead of gpus_per_node")
    exclusive: bool = key(True, "trials share their nodes with nobody: others would disturb the timings")
    cpus_per_node: int | None = key(
        None,
        "cores of a node; none: devices_per_node x threads_per_rank, but at least 4 for each GPU: its rank has threads "
        "for Python, autograd, data and NCCL; 8 are better where nodes have them",
        least=1,
    )
    mem: str | None = key(None, "memory of a node, as in 64G; 0: all of it; none: the cluster's default")
    time_limit_s: float | None = key(
        None,
        "wall time of a job; none: of a trial's, trial_timeout_s and two minutes; of a training's, an hour, after "
        "which it goes on in another",
        least=1,
        below=LARGEST_TIME_S,
    )
    warning_s: float = key(
        120.0, "seconds before that limit at which a training leaves a checkpoint", least=1, below=LARGEST_TIME_S
    )
    queue_timeout_s: float = key(
        604800.0, "seconds that a job may wait for its nodes before it is cancelled", least=1, below=LARGEST_TIME_S
    )
    mail_user: str | None = key(None, "who gets mail")
    mail_type: str | None = key(None, "about what, as in END,FAIL")
    array_throttle: int = key(256, "trials of one job array that run at a time", least=1)
    additional_parameters: dict[str, Any] = key(
        {},
        "more options of sbatch, as in {licenses: matlab}; true: one without a value",
        values=(str, int, bool),
    )
    srun_args: list[str] = key([], "further arguments of the srun that starts a task on each node")
    setup: list[str] = key([], "lines of shell before a trial, as in module load cuda")
    teardown: list[str] = key([], "lines of shell after it")
    container: str = key("none", "what trials run in", choices=("none", "apptainer", "pyxis"))
    container_image: str | None = key(None, "of the container: a file, or what pyxis takes")
    container_mounts: list[str] = key([], "folders that the container sees, as in /data:/data")
    container_python: str = key("python3", "of the container: an interpreter that has auto3d")


@dataclass
class PlanRecipe:
    dp: int = key(1, "data-parallel degree", least=1)
    tp: int = key(1, "tensor-parallel degree; only 1 can run yet", least=1)
    pp: int = key(1, "pipeline depth", least=1)
    micro_batch_size: int = key(1, "samples", least=1)
    schedule: str = key("1f1b", "the pipeline schedule", choices=tuple(SCHEDULES))
    schedule_options: dict[str, Any] = key(
        {}, "the schedule's own options, as in {chunks: 4, sync: eager}", values=(int, str)
    )
    recompute: int | float | str = key(
        "none",
        "what stages run again for the backward; a number: all but this share of the first stage's subgraphs, and of "
        "the others' as large a share as costs equal memory; auto: the largest for which the devices have memory",
        **RECOMPUTE,
    )
    shard_optimizer: bool = key(
        False, "each of the replicas of a stage keeps the optimizer's state of its share of the parameters (ZeRO-1)"
    )


@dataclass
class Recipe:
    model: ModelRecipe = field(default_factory=ModelRecipe)
    data: DataRecipe = field(default_factory=DataRecipe)
    cluster: ClusterRecipe = field(default_factory=ClusterRecipe)
    training: TrainingRecipe = field(default_factory=TrainingRecipe)
    emulation: EmulationRecipe | None = None  # of training.compute: emulated
    prediction: PredictionRecipe = field(default_factory=PredictionRecipe)  # the system whose times are predicted
    search: SearchRecipe = field(default_factory=SearchRecipe)
    measure: MeasureRecipe = field(default_factory=MeasureRecipe)
    launch: LaunchRecipe = field(default_factory=LaunchRecipe)
    plan: PlanRecipe | None = None  # the plan of `auto3d train` where no plan file is given
