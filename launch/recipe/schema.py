"""The schema of a recipe: every key with its default, its meaning and unit, and what it accepts."""

from dataclasses import dataclass, field
from typing import Any

from auto3d.cost.systems import SYSTEMS
from auto3d.plan import AUTO3D
from auto3d.runtime.settings import LEARNING_RATE_SCHEDULES, LOSS_MEANS
from launch.recipe.cluster_schema import ClusterRecipe
from launch.recipe.data_schema import DataRecipe
from launch.recipe.model_schema import ModelRecipe
from launch.recipe.schema_key import AUTO, LARGEST_BATCH, LARGEST_INTEGER, LARGEST_NODE, LARGEST_TIME_S, key
from launch.recipe.search_schema import PlanRecipe, SearchRecipe

PRECISIONS = ("float32", "bfloat16", "float16")
FLOAT8 = "float8"  # products of the blocks' weights in e4m3 and e5m2, all else in bfloat16; no training runs in it
UNFUSED = "unfused"
EAGER_NORMS = "eager"
TENSORBOARD, WANDB = "tensorboard", "wandb"
SCATTERED = "scattered"


@dataclass
class PredictionRecipe:
    precision: str = key(
        AUTO,
        "precision of weights and activations; auto: training.precision; another than that describes another system, "
        "and needs training.precision: float32; float8: bfloat16 with products of blocks in 8 bits, which "
        "nothing runs",
        choices=(AUTO, *PRECISIONS, FLOAT8),
    )
    sync_precision: str = key("float32", "precision of the gradient all-reduce", choices=PRECISIONS)
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
    system: str = key(
        AUTO3D,
        "system that is predicted: what its kernels save and what else it holds, its partition, gradient sums, update "
        "and loss (docs/cost.md); other systems' bytes are those in use, without what an allocator wastes",
        choices=(AUTO3D, *SYSTEMS),
    )
    keeps_gathered: bool | None = key(
        None,
        "under sequence parallelism, products keep their gathered inputs until the backward; false: the backward "
        "gathers them again; none: as the system does by default, which some systems have a switch for",
    )
    norms: str = key(
        AUTO,
        "how norms run that a model writes in several operations; auto: as the system's; eager: a kernel for each "
        "operation, in float32",
        choices=(AUTO, EAGER_NORMS),
    )
    reserve_gib: float = key(
        0.0,
        "GiB on each device beside tensors, for figures that count the context of CUDA and the buffers of libraries",
        least=0,
        below=LARGEST_INTEGER,
    )
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
class ParameterGroupRecipe:
    names: list[str] = key(["*"], "parameters of the group: names, or globs such as '*.bias'")
    dimensions: int | None = key(None, "only those with so many dimensions; none: any", least=0)
    optimizer: str | None = key(None, "their optimizer, as in training.optimizer; none: that one")
    optimizer_arguments: dict[str, Any] = key({}, "further arguments of the class of the group's own optimizer")
    learning_rate: float | None = key(None, "their highest learning rate; none: training.learning_rate", least=0)
    weight_decay: float | None = key(None, "their weight decay; none: training.weight_decay", least=0)


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
        "iterations of `auto3d train` between checkpoints, which are written while it goes on; one more is written at "
        "the end; each rank must write its share within timeout_s; none: only when SLURM asks the training to end",
        least=1,
    )
    checkpoint_keep: int = key(2, "checkpoints that stay; older ones are removed", least=1)
    log_every: int | None = key(
        None,
        "iterations between two lines about the progress of `auto3d train` in a log; none: by time, a line every 5 "
        "seconds at most",
        least=1,
    )
    report_to: list[str] = key(
        [],
        "who else gets the metrics of `auto3d train`, besides the terminal and the file metrics.jsonl (docs/watch.md)",
        choices=(TENSORBOARD, WANDB),
    )
    trace: list[int] = key(
        [],
        "iterations of `auto3d train`, from 1, to trace on every rank (docs/watch.md); 0: the first one after "
        "measure.warmup_iterations",
        least=0,
    )
    optimizer: str = key(
        "adamw",
        "the optimizer: adamw, sgd, adafactor, muon (hidden matrices by Muon, other parameters by adamw), or a class "
        "such as torch.optim.RMSprop or package.module:Class",
    )
    optimizer_arguments: dict[str, Any] = key({}, "further arguments of the optimizer's class")
    parameter_groups: list[ParameterGroupRecipe] = key(
        [], "parameters that are updated in another way; each belongs to the first group that takes it"
    )
    offload_optimizer: bool = key(
        False,
        "on GPUs, keep the optimizer's state on the host and update there; gradients and weights travel at each update",
    )
    learning_rate: float = key(1e-3, "highest learning rate", least=0)
    learning_rate_schedule: str = key(
        "constant",
        "how the learning rate falls after the warm-up; transformers' schedules",
        choices=LEARNING_RATE_SCHEDULES,
    )
    learning_rate_arguments: dict[str, Any] = key({}, "further arguments of that schedule, such as num_cycles")
    warmup_iterations: int = key(0, "iterations in which the learning rate rises linearly from 0", least=0)
    weight_decay: float = key(0.0, "weight decay", least=0)
    weight_decay_exempt: list[str] = key(
        [],
        "parameters without weight decay: names, globs such as '*.bias', or biases-and-norms (as in transformers)",
    )
    momentum: float = key(0.9, "momentum of sgd", least=0)
    betas: list[float] = key([0.9, 0.999], "the two betas of adamw", least=0, below=1)
    clip_norm: float = key(
        1.0, "largest norm of all gradients together; 0: no clipping, which asynchronous schedules need", least=0
    )
    clip_value: float = key(0.0, "largest absolute value of an element of a gradient, after clip_norm; 0: any", least=0)
    clip_ratio: float = key(
        0.0,
        "largest norm of a row of a gradient, as a part of the norm of its row of weights (adaptive clipping); 0: any",
        least=0,
    )
    loss_mean: str = key(
        "targets",
        "what the loss of a global batch is the mean of: its targets that are not ignored, or the losses of its "
        "micro-batches, as in a loop on one process",
        choices=LOSS_MEANS,
    )
    seed: int = key(1, "seed of initial weights, data order and dropout", least=0, below=LARGEST_INTEGER)
    precision: str = key(
        "float32",
        "precision in which operators compute, by torch.autocast's rules for the device; weights, gradients and "
        "optimizer state stay float32",
        choices=PRECISIONS,
    )
    tf32: bool = key(
        False,
        "on GPUs, round the float32 inputs of matrix products and convolutions to 10 bits of mantissa, which is "
        "faster; false: round neither",
    )
    compile: bool = key(
        False,
        "compile the operators of each stage with torch.compile before the first iteration, but not of slices of the "
        "sequence; docs/runtime.md has what it gains",
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
    send_s: Any = key(
        None,
        "seconds of such a message instead, which then carries no data; none: its own time, of its size",
        least=0,
        below=LARGEST_TIME_S,
        per_stage=float,
    )
    sync_bytes: Any = key(
        None,
        "bytes of each gradient all-reduce that a stage takes part in; none: the true size",
        least=1,
        below=LARGEST_INTEGER,
        per_stage=int,
    )
    sync_s: Any = key(
        None,
        "seconds in which the gradients of a stage add up that several ranks hold, instead; none: the time of its size",
        least=0,
        below=LARGEST_TIME_S,
        per_stage=float,
    )
    collective_s: Any = key(
        None,
        "seconds of each tensor-parallel collective for one micro-batch; none: real collectives of the true sizes",
        least=0,
        below=LARGEST_TIME_S,
        per_stage=float,
    )


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
    max_submitted: int | None = key(
        None,
        "most trials of a recipe that are pending or running at once, each counted as a job; none: as many as SLURM "
        "accepts. The others are submitted as these end",
        least=1,
    )
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
