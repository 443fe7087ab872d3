"""The schema of a recipe: every key with its default, its meaning and unit, and what it accepts."""

from collections.abc import Sequence
from dataclasses import dataclass, field, is_dataclass
from typing import Any

from auto3d.partition.methods import STAGE_METHODS
from auto3d.plan import AUTO3D, ENGINES, TENSOR_OVERLAPS
from auto3d.schedule import SCHEDULES
from auto3d.schedule.options import SYNC
from auto3d.search.algorithms import ALGORITHMS
from auto3d.search.placement import PLACEMENTS
from auto3d.search.space import REPLICAS
from auto3d.tensor.known_rules import RULES

AUTO = "auto"
UNFUSED = "unfused"
SCATTERED = "scattered"

# Larger values would make planning longer than any run: it lists all micro-batches and all divisors of the devices.
LARGEST_BATCH, LARGEST_NODES, LARGEST_NODE = 10**5, 10**4, 10**3
LARGEST_INTEGER = 2**63  # integers in tensors are below this
LARGEST_TIME_S = 10**8
TOKEN_KINDS = ("tokens", "next-tokens")
INPUT_KEYS = {  # kind of an input -> the keys that it takes
    **dict.fromkeys(TOKEN_KINDS, ("prefix", "prefix_length")),
    "integers": ("shape", "low", "high", "prefix", "prefix_length"),
    "normal": ("shape",),
    "constant": ("shape", "value"),
    "mask": ("shape", "count"),
}
RECOMPUTE = ("none", "full", AUTO)


def key(
    default: Any,
    meaning: str,
    *,
    choices: Sequence[str | bool] = (),
    least: float | None = None,
    below: float | None = None,
    per_stage: type | None = None,
    most: float | None = None,
    values: Sequence[type] = (),
    options: bool = False,
    per_precision: bool = False,
) -> Any:
    """A key of the schema. A number, or each number of a list, must be ≥ ``least``, ≤ ``most`` and < ``below``.

    ``choices``: the words that the key accepts; with ``most`` it accepts such words and numbers. ``options``: a word
    may be followed by a colon and options, which are checked later. ``values``: the types of a mapping's values.
    ``per_stage``: the key accepts one number of that type, or a list with one number per stage. ``per_precision``: the
    key accepts one number, or a mapping with one number per precision.
    """
    limits = {"least": least, "below": below, "most": most}
    kinds = {"values": tuple(values), "per_stage": per_stage, "per_precision": per_precision, "options": options}
    metadata = {"meaning": meaning, "choices": tuple(choices), **kinds, **limits}
    if isinstance(default, (list, dict)):
        return field(default_factory=default.copy, metadata=metadata)
    if isinstance(default, type) and is_dataclass(default):  # a group of keys inside this one
        return field(default_factory=default, metadata=metadata)
    return field(default=default, metadata=metadata)


@dataclass
class LayerRecipe:
    count: int = key(1, "number of equal consecutive layers", least=1, below=LARGEST_BATCH)
    parameters: float = key(0.0, "elements of the layer's weights", least=0)
    tied: float = key(0.0, "elements of further weights, which are shared with the first layer", least=0)
    flops: float = key(0.0, "FLOPs of the forward, per sample", least=0)
    products: int = key(1, "number of matrix products that do these FLOPs", least=1)
    traffic: float = key(0.0, "elements that the forward reads and writes outside matrix products, per sample", least=0)
    undivided: float = key(0.0, "elements of that traffic that tensor parallelism does not divide", least=0)
    saved: float = key(0.0, "elements saved for the backward, per sample", least=0)
    output: float = key(0.0, "elements passed on to the next layer, per sample", least=0)
    reductions: int = key(
        0, "all-reduces of the output under tensor parallelism, in a forward and again in a backward", least=0
    )


@dataclass
class ModelRecipe:
    architecture: str | None = key(None, "model class of transformers, such as GPT2LMHeadModel")
    config: dict[str, Any] = key({}, "keys of that class's configuration; keys that are not given keep its defaults")
    factory: str | None = key(None, "package.module:function that returns an nn.Module; replaces architecture")
    arguments: dict[str, Any] = key({}, "keyword arguments of the factory")
    forward: dict[str, Any] = key(
        {},
        "constant keyword arguments of the model's forward, in addition to data.inputs, as in {return_loss: true}",
        values=(bool, int, float, str),
    )
    tensor_parallel: dict[str, Any] = key(
        {},
        "how tensor parallelism splits weights: names of modules, * for any part of a name, as in "
        "{transformer.h.*.mlp.c_fc: column}; column: by output features; heads: the same, by whole attention heads; "
        "row: by input features; vocabulary: the rows of an embedding or of a language model's head; whole: not; other "
        "modules as docs/tensor.md says",
        values=(str,),
        choices=RULES,
    )
    weights: str | None = key(None, "safetensors file with initial weights; none: they are drawn from training.seed")
    layers: str | None = key(
        None,
        "CSV file of measured layers; replaces architecture and factory where plans are only predicted (docs/cost.md)",
    )
    layers_of: str | None = key(None, "model to read from the file of layers: a value of its column `model`")
    layer_sizes: list[LayerRecipe] = key([], "sizes and costs of the measured layers, in order")


@dataclass
class InputRecipe:
    kind: str = key(
        "tokens",
        "what the input holds: tokens, the same tokens shifted by one, uniform integers, normal numbers, one value "
        "everywhere, or booleans with a fixed number of true ones (docs/models.md)",
        choices=tuple(INPUT_KEYS),
    )
    shape: list[int] = key(
        [], "shape of one sample; the kinds tokens and next-tokens take none", least=1, below=LARGEST_INTEGER
    )
    low: int = key(0, "kind integers: smallest value", least=-LARGEST_INTEGER, below=LARGEST_INTEGER)
    high: int = key(2, "kind integers: values are below this", least=1, below=LARGEST_INTEGER)
    value: bool | int | float = key(1, "kind constant: the value; its type is the input's type")
    count: int = key(1, "kind mask: number of true places", least=0, below=LARGEST_INTEGER)
    prefix: int = key(
        0,
        "tokens and integers: value of the first places, such as the id of an image's tokens, or -100 for no label",
        least=-LARGEST_INTEGER,
        below=LARGEST_INTEGER,
    )
    prefix_length: int = key(
        0, "tokens and integers: number of first places that hold prefix", least=0, below=LARGEST_INTEGER
    )


@dataclass
class DataRecipe:
    source: str = key("text", "source of tokens: the bytes of files, or random numbers", choices=("text", "synthetic"))
    files: list[str] = key(
        [], "source text: files to read, * allowed; none: the source code of Python's standard library"
    )
    sequence_length: int = key(128, "tokens per sample", least=1, below=LARGEST_INTEGER)
    vocabulary_size: int = key(256, "source synthetic: tokens are below this", least=1, below=LARGEST_INTEGER)
    inputs: dict[str, InputRecipe] = key({}, "inputs of the model by name; none: input_ids and labels, both tokens")


@dataclass
class LinkRecipe:
    gbit_per_s: float = key(100.0, "bandwidth of one lane in each direction, in Gbit/s", least=1e-6)
    latency_us: float = key(20.0, "latency of a message, in microseconds", least=0)
    lanes: int | None = key(None, "lanes that the devices of a node share; none: one per device", least=1)


@dataclass
class NodesRecipe:
    nodes: int = key(1, "number of machines", least=1, below=LARGEST_NODES)
    devices_per_node: int = key(
        4, "ranks per machine: one per GPU, or as many as a CPU should run", least=1, below=LARGEST_NODE
    )
    accelerator: str | None = key(
        None, "kind of device: a file of recipes/accelerators/; none: round figures of a data-centre GPU"
    )
    inside: LinkRecipe = key(LinkRecipe, "links between the devices of a node")
    outside: LinkRecipe | None = key(LinkRecipe, "links from a node to the others; none: there are none")


@dataclass
class AcceleratorRecipe:
    """The keys of a file of recipes/accelerators/."""

    peak_tflops: dict[str, float] = key({}, "peak speed of matrix products in TFLOP/s, by precision")
    memory_gib: float | None = key(None, "memory that a process may fill, in GiB; none: unknown", least=0.001)
    memory_gb_per_s: float = key(700.0, "memory bandwidth, in GB/s", least=1e-6)
    matrix_efficiency: Any = key(
        0.6,
        "fraction of the peak speed that large matrix products reach; one number, or one by precision",
        least=0.001,
        most=1,
        per_precision=True,
    )
    half_gflops: Any = key(
        1.0,
        "GFLOP of a matrix product that is so small that it reaches half of that fraction; one number, or one by "
        "precision",
        least=0,
        per_precision=True,
    )
    memory_efficiency: float = key(0.75, "fraction of the memory bandwidth that operations reach", least=0.001, most=1)
    launch_us: float = key(10.0, "microseconds from the launch of one operation to the launch of the next", least=0)
    collective_launch_us: float = key(
        10.0, "microseconds that a collective inside a stage takes for each other rank that it waits for", least=0
    )
    micro_batch_us: float = key(
        0.0, "microseconds of host time per micro-batch of a stage, in addition to its operations", least=0
    )
    iteration_ms: float = key(0.0, "milliseconds that every iteration takes in addition, whatever its size", least=0)


@dataclass
class ClusterRecipe(NodesRecipe):
    more: list[NodesRecipe] = key([], "more nodes, of other kinds")
    device: str = key("cpu", "type of device that a rank computes on", choices=("cpu", "cuda"))
    memory_gib: float | None = key(
        None,
        "memory that a process may fill on each device, in GiB; plans that need more are refused; none: memory_gib of "
        "each node's accelerator, which is usable memory and not the data sheet's figure",
        least=0.001,
    )


@dataclass
class PredictionRecipe:
    precision: str = key("float32", "precision of weights and activations", choices=("float32", "float16", "bfloat16"))
    sync_precision: str = key(
        "float32", "precision of the gradient all-reduce", choices=("float32", "float16", "bfloat16")
    )
    fused: bool = key(False, "count consecutive elementwise operations as one kernel, as in Megatron-LM")
    attention: str = key(
        AUTO,
        "how attention runs; auto: by the kernel that torch picks on the recipe's device; unfused: as matrix products "
        "with a softmax between them, as in Megatron-LM before FlashAttention",
        choices=(AUTO, UNFUSED),
    )
    overlap: bool = key(True, "messages overlap with compute")
    messages: str = key(
        AUTO,
        "how tensor-parallel ranks send a value to the next stage; auto: each rank the whole of what it has, as this "
        "runtime does; scattered: each a part, which the receivers gather, as Megatron-LM and DeepSpeed do",
        choices=(AUTO, SCATTERED),
    )
    recompute_ends: bool = key(True, "full recomputation includes embedding and head; Megatron-LM's does not")
    columns: dict[str, str] = key(
        {},
        "columns of candidate files that have another name there, as in {hidden: model.config.n_embd}",
        values=(str,),
    )
    profile: str = key(
        AUTO,
        "profile whose measured times are used; auto: profiles/<cluster>-<recipe>.json if `auto3d tune` has measured "
        "it, else profiles/<cluster>.json if `auto3d profile` has; none; or a file",
    )
    method: str = key(
        "simulated",
        "how an iteration's time follows from the costs of operations: by simulation, or by AMP's or Chimera's formula",
        choices=("simulated", "amp", "chimera"),
    )


@dataclass
class TrainingRecipe:
    compute: str = key(
        "real",
        "real: ranks compute; emulated: each operation only takes the time that the group emulation gives it",
        choices=("real", "emulated"),
    )
    global_batch: int = key(16, "samples per iteration, over all pipelines", least=1, below=LARGEST_BATCH)
    iterations: int = key(20, "iterations of `auto3d train`", least=1)
    check_capture: bool = key(
        True,
        "before train, sweep and tune, compare loss and gradients of the captured model with those of the model itself "
        "on one micro-batch, if that takes at most 1 GiB and 0.1 TFLOP; once per capture",
    )
    checkpoint_every: int | None = key(
        None,
        "iterations of `auto3d train` between checkpoints; one more is written at the end; each rank must write its "
        "shard within timeout_s; none: only when SLURM asks the training to end",
        least=1,
    )
    optimizer: str = key("adamw", "the optimizer", choices=("adamw", "sgd"))
    learning_rate: float = key(1e-3, "highest learning rate", least=0)
    learning_rate_schedule: str = key(
        "constant", "how the learning rate falls after the warm-up", choices=("constant", "linear", "cosine")
    )
    warmup_iterations: int = key(0, "iterations in which the learning rate rises linearly from 0", least=0)
    weight_decay: float = key(0.0, "weight decay of every parameter", least=0)
    momentum: float = key(0.9, "momentum of sgd", least=0)
    betas: list[float] = key([0.9, 0.999], "the two betas of adamw", least=0, below=1)
    clip_norm: float = key(
        1.0, "largest norm of all gradients together; 0: no clipping, which asynchronous schedules need", least=0
    )
    seed: int = key(1, "seed of initial weights, data order and dropout", least=0, below=LARGEST_INTEGER)
    tf32: bool = key(
        False,
        "on GPUs, round the float32 inputs of matrix products and convolutions to 10 bits of mantissa, which is "
        "faster; false: round neither",
    )
    deterministic: bool = key(
        False,
        "use only deterministic algorithms, so that GPUs too repeat a run bit for bit; this is slower, and operations "
        "that have no such algorithm are refused",
    )
    threads_per_rank: int = key(1, "threads that a rank on a CPU computes with", least=1, below=LARGEST_NODE)
    timeout_s: float = key(
        120.0, "seconds that a rank waits for another before it gives up", least=1, below=LARGEST_TIME_S
    )


@dataclass
class EmulationRecipe:
    forward_s: Any = key(
        None,
        "seconds of a stage's forward of one micro-batch; none: predicted by the cost model",
        least=0,
        below=LARGEST_TIME_S,
        per_stage=float,
    )
    backward_s: Any = key(
        None,
        "seconds of the backward; none: the sum of its halves, or predicted by the cost model",
        least=0,
        below=LARGEST_TIME_S,
        per_stage=float,
    )
    backward_input_s: Any = key(
        None,
        "seconds of the backward's half for the input's gradient; none: half of the backward",
        least=0,
        below=LARGEST_TIME_S,
        per_stage=float,
    )
    backward_weight_s: Any = key(
        None,
        "seconds of its half for the weights' gradients; none: half of the backward",
        least=0,
        below=LARGEST_TIME_S,
        per_stage=float,
    )
    recompute_s: Any = key(
        None,
        "seconds of running the forward again; none: as long as the forward",
        least=0,
        below=LARGEST_TIME_S,
        per_stage=float,
    )
    send_bytes: Any = key(
        None,
        "bytes that a stage sends to a later one for one micro-batch; none: the true size",
        least=1,
        below=LARGEST_INTEGER,
        per_stage=int,
    )
    sync_bytes: Any = key(
        None,
        "bytes of each gradient all-reduce that a stage takes part in; none: the true size",
        least=1,
        below=LARGEST_INTEGER,
        per_stage=int,
    )
    collective_s: Any = key(
        None,
        "seconds of each tensor-parallel collective for one micro-batch; none: real collectives of the true sizes",
        least=0,
        below=LARGEST_TIME_S,
        per_stage=float,
    )


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
        "ones",
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
        "search algorithm of `auto3d plan` and `auto3d tune`; auto: exhaustive if the space is small, else annealing; "
        "amp: AMP's own space and annealing (its paper's algorithm 1), whatever schedule, partition, placement and "
        "replicas say",
        choices=(AUTO, *ALGORITHMS),
    )
    candidates: int | None = key(
        None, "most candidates that a search estimates; none: 2000, or 500 if the algorithm is amp", least=1
    )
    seconds: float = key(60.0, "most seconds of processor time that a search takes", least=0.1, below=LARGEST_TIME_S)
    trials: int | None = key(
        None,
        "most trials that `auto3d tune` runs; none: 15, or 10 if the algorithm is amp; three in five try the best "
        "candidates, the others repeat the fastest of these, in turns, until their order is certain; amp repeats none",
        least=1,
    )
    seed: int = key(1, "seed of the search", least=0, below=LARGEST_INTEGER)


@dataclass
class MeasureRecipe:
    warmup_iterations: int = key(2, "iterations of a trial before the measured ones", least=0)
    iterations: int = key(5, "measured iterations of a trial", least=1)
    communication: bool = key(
        False,
        "run each trial of a DeepSpeed engine a second time, to log bytes and seconds of its communication calls "
        "(docs/peers.md)",
    )


@dataclass
class LaunchRecipe:
    executor: str = key(
        AUTO,
        "where trials and trainings run; auto: as SLURM jobs if sinfo answers and this command is not in a job itself, "
        "else on this machine",
        choices=(AUTO, "slurm", "local"),
    )
    concurrent_trials: int = key(
        1,
        "trials that run at the same time, each on its own GPUs; on one machine, more than 1 disturbs the timings",
        least=1,
    )
    trial_timeout_s: float = key(600.0, "seconds after which a trial is ended", least=1, below=LARGEST_TIME_S)
    attempts: int = key(3, "starts of a trial after which `auto3d resume` leaves it as failed", least=1)
    # keys for SLURM; see docs/slurm.md
    partition: str | None = key(None, "SLURM partition; none: the cluster's default")
    account: str | None = key(None, "SLURM account that pays for the jobs")
    qos: str | None = key(None, "SLURM quality of service")
    constraint: str | None = key(None, "features that nodes must have, as in a100&nvlink")
    reservation: str | None = key(None, "SLURM reservation to run in")
    nodelist: str | None = key(None, "nodes to run on, as in n[1-4]")
    exclude: str | None = key(None, "nodes not to run on")
    gpus_per_node: str | None = key(
        None, "GPUs to request per node, as in a100:4; none: devices_per_node if they are cuda and gres is not given"
    )
    gres: str | None = key(None, "generic resources to request per node, as in gpu:a100:4; replaces gpus_per_node")
    exclusive: bool = key(True, "trials share their nodes with no other job, which would disturb the timings")
    cpus_per_node: int | None = key(
        None,
        "cores to request per node; none: devices_per_node x threads_per_rank, but at least 4 per GPU, because a rank "
        "has threads for Python, autograd, data and NCCL; 8 are better where nodes have them",
        least=1,
    )
    mem: str | None = key(None, "memory to request per node, as in 64G; 0: all of it; none: the cluster's default")
    time_limit_s: float | None = key(
        None,
        "wall-time limit of a job, in seconds; none: trial_timeout_s and two minutes for a trial, an hour for a "
        "training, which then continues in another job",
        least=1,
        below=LARGEST_TIME_S,
    )
    warning_s: float = key(
        120.0, "seconds before that limit at which a training writes a checkpoint", least=1, below=LARGEST_TIME_S
    )
    queue_timeout_s: float = key(
        604800.0, "seconds after which a pending job is cancelled", least=1, below=LARGEST_TIME_S
    )
    mail_user: str | None = key(None, "recipient of SLURM's mails")
    mail_type: str | None = key(None, "events that SLURM sends mail about, as in END,FAIL")
    array_throttle: int = key(256, "trials of one job array that run at the same time", least=1)
    additional_parameters: dict[str, Any] = key(
        {},
        "further options of sbatch, as in {licenses: matlab}; true: an option without a value",
        values=(str, int, bool),
    )
    srun_args: list[str] = key([], "further arguments of the srun that starts a task on each node")
    setup: list[str] = key([], "shell lines to run before a trial, as in module load cuda")
    teardown: list[str] = key([], "shell lines to run after a trial")
    container: str = key("none", "container runtime that trials run in", choices=("none", "apptainer", "pyxis"))
    container_image: str | None = key(None, "container image: a file, or a name that pyxis takes")
    container_mounts: list[str] = key([], "folders to mount in the container, as in /data:/data")
    container_python: str = key("python3", "Python interpreter in the container; auto3d must be installed there")


@dataclass
class PlanRecipe:
    dp: int = key(1, "data-parallel degree", least=1)
    tp: int = key(1, "tensor-parallel degree", least=1)
    pp: int = key(1, "pipeline depth", least=1)
    micro_batch_size: int = key(1, "samples per micro-batch", least=1)
    schedule: str = key("1f1b", "pipeline schedule", choices=tuple(SCHEDULES))
    schedule_options: dict[str, Any] = key(
        {}, "options of the schedule, as in {chunks: 4, sync: eager}", values=(int, str)
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


@dataclass
class Recipe:
    model: ModelRecipe = field(default_factory=ModelRecipe)
    data: DataRecipe = field(default_factory=DataRecipe)
    cluster: ClusterRecipe = field(default_factory=ClusterRecipe)
    training: TrainingRecipe = field(default_factory=TrainingRecipe)
    emulation: EmulationRecipe | None = None  # only for training.compute: emulated
    prediction: PredictionRecipe = field(default_factory=PredictionRecipe)  # the system whose times are predicted
    search: SearchRecipe = field(default_factory=SearchRecipe)
    measure: MeasureRecipe = field(default_factory=MeasureRecipe)
    launch: LaunchRecipe = field(default_factory=LaunchRecipe)
    plan: PlanRecipe | None = None  # the plan of `auto3d train` where no plan file is given
