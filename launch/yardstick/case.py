"""What a predictor without a captured model is told about a run: a Case, and its form as a row of CSV."""

from dataclasses import asdict, dataclass

from auto3d.schedule import parse_schedule
from launch.model.predictions import candidate_of_row
from launch.recipe.load import LoadedRecipe
from launch.recipe.schema import UNFUSED
from launch.recipe.settings import cluster, predicted_precision
from launch.yardstick.measured import MeasuredSet, ModelSizes, PublishedRun, whole


@dataclass(frozen=True, kw_only=True)
class Case:
    """A run as numbers; sizes in bytes, times in seconds, bandwidths in bytes per second and direction."""

    id: str
    sizes: ModelSizes
    nodes: int
    devices_per_node: int
    peak_flops: float  # FLOPs per second of one device, in ``precision``
    memory_bytes: float  # bytes that a process may fill
    memory_bandwidth: float
    inside_bandwidth: float  # between the devices of a node, for each device
    inside_latency_s: float
    outside_bandwidth: float  # between nodes, for each device
    outside_latency_s: float
    tp: int
    dp: int
    pp: int
    micro_batch_size: int
    global_batch: int
    schedule: str
    zero: int  # 1: each data-parallel rank keeps a part of the optimizer's state
    recompute: str  # none or full
    sequence_parallel: bool
    fused_attention: bool  # no rank keeps the attention weights
    precision: str
    sync_precision: str  # precision of the gradient all-reduce
    system: str

    @property
    def micro_batches(self) -> int:
        return self.global_batch // (self.dp * self.micro_batch_size)

    @property
    def chunks(self) -> int:
        """Stages on each pipeline device: several under interleaved 1F1B."""
        return int(parse_schedule(self.schedule)[1].get("chunks", 1))

    def link(self, ranks: int) -> tuple[float, float]:
        """(bytes per second, seconds of latency) among so many ranks that are neighbours."""
        if ranks <= self.devices_per_node:
            return self.inside_bandwidth, self.inside_latency_s
        return self.outside_bandwidth, self.outside_latency_s

    def columns(self) -> dict[str, str]:
        """The row of CSV that an external program reads."""
        values = asdict(self)
        sizes = values.pop("sizes")
        flat = {"id": values.pop("id"), **sizes, "parameters": self.sizes.parameters, **values}
        return {name: f"{int(value)}" if isinstance(value, bool) else f"{value}" for name, value in flat.items()}


def case_of(measured: MeasuredSet, recipe: LoadedRecipe, run: PublishedRun) -> Case:
    """The Case of ``run``; what its row leaves open comes from ``recipe``."""
    values, row = recipe.values, run.row
    plan = candidate_of_row(recipe, row)
    machine = cluster(recipe)
    node = machine.nodes[0]
    outside = node.outside or node.inside
    return Case(
        id=f"{measured.name}-{run.line}",
        sizes=run.sizes,
        nodes=max(1, plan.tp * plan.dp * plan.pp // node.devices),
        devices_per_node=node.devices,
        peak_flops=node.accelerator.peak_flops,
        memory_bytes=node.accelerator.memory_bytes or 0.0,
        memory_bandwidth=node.accelerator.memory_bandwidth,
        inside_bandwidth=node.inside.bandwidth_per_device(node.devices),
        inside_latency_s=node.inside.latency_s,
        outside_bandwidth=outside.bandwidth_per_device(node.devices),
        outside_latency_s=outside.latency_s,
        tp=plan.tp,
        dp=plan.dp,
        pp=plan.pp,
        micro_batch_size=plan.micro_batch_size,
        global_batch=whole(row, "training.global_batch") if row.get("training.global_batch") else _batch(recipe),
        schedule=plan.schedule,
        zero=int(plan.shard_optimizer),
        recompute=f"{plan.recompute}",
        sequence_parallel=plan.sequence_parallel and plan.tp > 1,
        fused_attention=values.prediction.attention != UNFUSED,
        precision=predicted_precision(values),
        sync_precision=values.prediction.sync_precision,
        system=measured.system,
    )


def _batch(recipe: LoadedRecipe) -> int:
    return recipe.values.training.global_batch
