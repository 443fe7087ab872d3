"""What each peer cannot train, as the reason that a row of the table gives. Imports neither torch nor a peer."""

from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import version
from importlib.util import find_spec

from auto3d.capture.graph import Graph
from auto3d.cluster import place_ranks
from auto3d.partition.stage import Stage, cut
from auto3d.plan import (
    DDP,
    DEEPSPEED_PIPELINE,
    FSDP,
    FSDP_GATHERED,
    TORCH_PIPELINING,
    ZERO_1,
    ZERO_2,
    ZERO_3,
    EngineRefusalError,
    Plan,
)
from auto3d.runtime.settings import MUON, TrainingSettings
from auto3d.schedule import SCHEDULES, schedule_of
from auto3d.schedule.options import SYNC

DEEPSPEED = (DEEPSPEED_PIPELINE, ZERO_1, ZERO_2, ZERO_3)
TORCH_SCHEDULES = ("gpipe", "1f1b", "interleaved-1f1b", "interleaved-zero-bubble", "looped-bfs", "zb-v")
TORCH_IN_ROUNDS = ("interleaved-1f1b", "interleaved-zero-bubble")


def engine_version(engine: str) -> str:
    """The package of ``engine`` and its version, if that is installed and is neither auto3d nor torch; else empty."""
    return f"deepspeed {version('deepspeed')}" if engine in DEEPSPEED and find_spec("deepspeed") else ""


def check_engine(
    plan: Plan, graph: Callable[[], Graph], settings: TrainingSettings, *, unequal_targets: bool = False
) -> None:
    """Raise EngineRefusalError unless the peer ``plan.engine`` can train ``plan`` with ``settings`` as auto3d would.

    ``graph`` returns the model's Graph at the samples that the plan runs at once. ``unequal_targets``: whether samples
    of the data may have unequal numbers of targets that count.
    """
    if reason := _refusal(plan, graph, settings, unequal_targets):
        raise EngineRefusalError(plan, reason)


def _refusal(plan: Plan, graph: Callable[[], Graph], settings: TrainingSettings, unequal_targets: bool) -> str:
    if plan.engine in DEEPSPEED and find_spec("deepspeed") is None:
        return "is not installed; pip install 'deepspeed>=0.19'"
    if reason := _other_training(plan, settings):
        return reason
    if unequal_targets:
        return (
            "averages micro-batches whatever number of targets counts in each, which here may differ; use "
            "data.packing=packed and data.last_batch=drop"
        )
    if plan.tp > 1:
        return f"has no tensor parallelism for an unmodified model; the plan has tp = {plan.tp}"
    if any(stage.replicas > 1 for stage in plan.stages):
        return "has no replicas of single stages; use search.replicas=[equal]"
    if SCHEDULES[plan.schedule].asynchronous:
        return f"has no asynchronous schedule, such as {plan.schedule}"
    if schedule_of(plan).recompute:
        return "runs here without recomputation; use search.recompute=[none]"
    if plan.schedule_options.get("sync", SYNC[0]) != SYNC[0]:
        return f"decides itself when gradients are summed; use search.sync=[{SYNC[0]}]"
    return _REFUSALS[plan.engine](plan, graph)


def _other_training(plan: Plan, settings: TrainingSettings) -> str:
    """Settings that the peer would leave out, or follow in another way."""
    optimizer = settings.optimizer
    if settings.emulation is not None:
        return "computes for real; use training.compute=real"
    if settings.precision != "float32":
        return f"trains here in float32, and training.precision is {settings.precision}"
    if settings.compile:
        return "runs here without torch.compile; use training.compile=false"
    if optimizer.offload:
        return "keeps the optimizer's state where it computes; use training.offload_optimizer=false"
    if optimizer.clip_value or optimizer.clip_ratio:
        return "clips by the norm of all gradients only; use training.clip_value=0 and training.clip_ratio=0"
    if optimizer.weight_decay and optimizer.exempt:
        return "decays every weight here; use training.weight_decay_exempt=[], or training.weight_decay=0"
    if optimizer.groups or optimizer.optimizer == MUON:
        return f"updates all weights alike here; use training.parameter_groups=[] and no training.optimizer={MUON}"
    if (_always_shards(plan) or plan.shard_optimizer) and not _elementwise(settings):
        return (
            f"updates slices of weights, and training.optimizer {optimizer.optimizer} combines the elements of a "
            "weight; use an elementwise one, such as adamw"
        )
    if plan.pp * plan.tp > 1 and _adds_up(settings):
        return f"makes steps of each rank alone, and training.optimizer {optimizer.optimizer} adds up over all weights"
    return ""


def _always_shards(plan: Plan) -> bool:
    return plan.engine in (ZERO_1, ZERO_2, ZERO_3, FSDP, FSDP_GATHERED)


def _elementwise(settings: TrainingSettings) -> bool:
    if settings.optimizer.updates_all_alike:
        return True
    from auto3d.runtime.optimizer.classes import is_elementwise  # imports torch

    return is_elementwise(settings.optimizer)


def _adds_up(settings: TrainingSettings) -> bool:
    if settings.optimizer.updates_all_alike:
        return False
    from auto3d.runtime.optimizer.classes import traits_of  # imports torch

    return traits_of(settings.optimizer).adds_up


def _data_parallel(plan: Plan) -> str:
    return f"has no pipeline; the plan has pp = {plan.pp}" if plan.pp > 1 else ""


def _ddp(plan: Plan, graph: Callable[[], Graph]) -> str:
    if plan.shard_optimizer:
        return "keeps the whole optimizer state on each rank; fsdp and deepspeed-zero shard it"
    return _data_parallel(plan)


def _sharded(plan: Plan, graph: Callable[[], Graph]) -> str:
    if plan.shard_optimizer:
        return "always shards the optimizer state; use search.shard_optimizer=[false]"
    return _data_parallel(plan)


def _torch_pipelining(plan: Plan, graph: Callable[[], Graph]) -> str:
    if plan.schedule not in TORCH_SCHEDULES:
        return f"has {', '.join(TORCH_SCHEDULES)}, and not {plan.schedule}"
    if plan.shard_optimizer:
        return "is run with the whole optimizer state on each rank; use search.shard_optimizer=[false]"
    if plan.schedule in TORCH_IN_ROUNDS and (reason := _torch_rounds(plan)):
        return reason
    if reason := _pipeline(plan):
        return reason
    stages = cut(graph(), plan.stages)
    if holders := shared_weights(stages, graph()):
        return f"does not sum the gradients of a weight that stages share; {_first_two(holders)}"
    return _skip(stages)


def _torch_rounds(plan: Plan) -> str:
    if plan.schedule_options.get("fewer", 0):
        return "interleaves equally many stages on each device; the plan has fewer on some"
    rounds = max(1, plan.micro_batches // plan.pp)
    if plan.micro_batches % rounds:
        return f"interleaves a multiple of {rounds} micro-batches; the plan has {plan.micro_batches}"
    own = plan.micro_batches // rounds
    if plan.schedule_options.get("group", 0) not in (0, own):
        return f"interleaves groups of {own} micro-batches here; use group={own}"
    return ""


def _deepspeed_pipeline(plan: Plan, graph: Callable[[], Graph]) -> str:
    if plan.schedule != "1f1b":
        return "has one schedule: 1f1b"
    if reason := _pipeline(plan):
        return reason
    stages = cut(graph(), plan.stages)
    holders = shared_weights(stages, graph())
    if len(set(holders.values())) > 1:
        return f"ties all shared weights between the same stages only; {_first_two(holders)}"
    return _skip(stages)


def _pipeline(plan: Plan) -> str:
    if plan.pp == 1:
        return "needs 2 stages or more; the plan has pp = 1"
    if plan.placement != place_ranks(dp=plan.dp, pp=plan.pp):
        return "places ranks in Megatron-LM's order only; use search.placement=[megatron]"
    return ""


def shared_weights(stages: Sequence[Stage], graph: Graph) -> dict[str, tuple[int, ...]]:
    """Each trained parameter that several of ``stages`` use, with their numbers."""
    users = {name: tuple(stage.index for stage in stages if name in stage.state) for name in sorted(graph.trained)}
    return {name: indices for name, indices in users.items() if len(indices) > 1}


def _first_two(holders: Mapping[str, tuple[int, ...]]) -> str:
    """Where two shared weights are, or the only weight; the second is on other stages than the first."""
    by_stages: dict[tuple[int, ...], str] = {}
    for name, indices in holders.items():
        by_stages.setdefault(indices, name)
    first = list(by_stages.items())[:2]
    return ", ".join(f"{name} is on stages {' and '.join(map(str, indices))}" for indices, name in first)


def _skip(stages: tuple[Stage, ...]) -> str:
    for stage in stages:
        for transfer in stage.received:
            if transfer.target != transfer.source + 1:
                return (
                    f"sends values to the next stage only; {transfer.value.name} goes from stage {transfer.source} to "
                    f"stage {transfer.target}"
                )
    return ""


_REFUSALS: dict[str, Callable[[Plan, Callable[[], Graph]], str]] = {
    TORCH_PIPELINING: _torch_pipelining,
    DEEPSPEED_PIPELINE: _deepspeed_pipeline,
    ZERO_1: _sharded,
    ZERO_2: _sharded,
    ZERO_3: _sharded,
    DDP: _ddp,
    FSDP: _sharded,
    FSDP_GATHERED: _sharded,
}
