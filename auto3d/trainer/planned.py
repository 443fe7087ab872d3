"""The Plan of a Trainer: of the degrees or the file that ``init`` was given, or the fastest of a search."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from torch import nn

from auto3d.capture.export import InputSpec
from auto3d.capture.model import CapturedModel, capture
from auto3d.cluster import Cluster, Node
from auto3d.cost.training_options import TrainingOptions
from auto3d.derived.planned_split import planned_split
from auto3d.errors import InputError
from auto3d.plan import Plan
from auto3d.planner import Planner
from auto3d.schedule import samples_at_once
from auto3d.search.axes import Candidate, plan_name
from auto3d.search.space import SearchSpace
from auto3d.search.synthesized import is_sought
from auto3d.share import share_of
from auto3d.trainer.arguments import TrainingArguments
from auto3d.trainer.machine import machine
from auto3d.trainer.rank_zero import of_rank_0
from auto3d.trainer.samples import CollatedData
from auto3d.trainer.settings import precision_of
from auto3d.trainer.setup import Setup

PLAN_FILE = "plan.json"  # in output_dir: the plan that a search has found


@dataclass(frozen=True, kw_only=True)
class Batch:
    """The sizes of a training's batches, in samples."""

    micro_batch_size: int
    global_batch: int


def batch_of(setup: Setup, args: TrainingArguments) -> Batch:
    """The batch sizes; raises InputError where ``args`` contradicts the plan of a file, whose sizes count."""
    size, accumulated = args.per_device_train_batch_size, args.gradient_accumulation_steps
    if setup.plan is None:
        pipelines = setup.world.size if setup.degrees is None else setup.degrees[0]
        return Batch(micro_batch_size=size, global_batch=size * accumulated * pipelines)
    plan = setup.plan
    searched_for = size * accumulated * setup.world.size == plan.global_batch  # plan="auto" reads the arguments so
    for name, value, planned in (
        ("per_device_train_batch_size", size, plan.micro_batch_size),
        ("gradient_accumulation_steps", accumulated, plan.micro_batches),
    ):
        if not searched_for and value not in (planned, TrainingArguments.__dataclass_fields__[name].default):
            raise InputError(
                f"TrainingArguments.{name}: found {value}; {setup.plan_file} was made for {planned}; leave it out, or "
                f"give arguments whose product with {setup.world.size} processes is its global batch of "
                f"{plan.global_batch}"
            )
    return Batch(micro_batch_size=plan.micro_batch_size, global_batch=plan.global_batch)


def plan_of(
    setup: Setup, args: TrainingArguments, build: Callable[[], nn.Module], inputs: Mapping[str, InputSpec]
) -> tuple[Plan, CapturedModel]:
    """The Plan, and the model captured as it needs it. All ranks must call it; they get the same Plan.

    Raises InputError where there is no such Plan, or the model cannot be captured.
    """
    kind, batch = args.device.type, batch_of(setup, args)
    if setup.plan is not None:
        if args.activation_checkpointing:
            raise InputError(
                f"TrainingArguments.activation_checkpointing: found True; {setup.plan_file} says what is recomputed"
            )
        plan = replace(setup.plan, seed=args.seed)
        return plan, capture(build, inputs, samples_at_once(plan), device=kind, precision=precision_of(args))
    precision = precision_of(args)
    options = TrainingOptions(
        precision=precision,
        autocast=precision != "float32",
        read_once=CollatedData.read_once,
        deterministic=args.full_determinism,
    )
    planner_on = partial(Planner, build, inputs, global_batch=batch.global_batch, seed=args.seed, training=options)
    if setup.degrees is not None:
        choices = {"recompute": "full" if args.activation_checkpointing else "none", "partition": "autopipe"}
        if args.activation_checkpointing and "recompute" in setup.choices:
            raise InputError("TrainingArguments.activation_checkpointing: auto3d.init(recompute=) decides it; give one")
        cluster = Cluster(nodes=(Node(devices=setup.world.size),), device=kind)
        if setup.choices.get("recompute") == "auto":
            cluster = machine(setup.world, args.device)
        planner = planner_on(cluster)
        dp, tp, pp = setup.degrees
        candidate = Candidate(
            dp=dp, tp=tp, pp=pp, micro_batch_size=batch.micro_batch_size, **choices | dict(setup.choices)
        )
        if is_sought(candidate):  # each rank would find another order
            text = of_rank_0(lambda: planner.plan(**vars(candidate)).to_json(), "to find an order")
            plan = Plan.from_json(text)
        else:
            plan = planner.plan(**vars(candidate))
        return plan, planner.captured(samples_at_once(plan))
    planner = planner_on(setup.cluster or machine(setup.world, args.device))
    plan = _fastest(planner, setup, args)
    return plan, planner.captured(samples_at_once(plan))


def planned_again(
    plan: Plan,
    captured: CapturedModel,
    args: TrainingArguments,
    build: Callable[[], nn.Module],
    inputs: Mapping[str, InputSpec],
) -> tuple[Plan, CapturedModel] | None:
    """``plan``, the Plan of ``captured``, for a model that has changed since; None if it has other operations.

    What is trained may have changed: the cuts stay. The split of weights among tensor-parallel ranks follows from it.
    """
    again = capture(build, inputs, samples_at_once(plan), device=args.device.type, precision=precision_of(args))
    if [node.name for node in again.graph.nodes] != [node.name for node in captured.graph.nodes]:
        return None
    if plan.tp > 1:
        split = planned_split(again, share_of(plan), rules={})
        plan = replace(plan, split=split)
    return replace(plan, graph=again.graph.fingerprint), again


def _fastest(planner: Planner, setup: Setup, args: TrainingArguments) -> Plan:
    """The fastest Plan, on every rank; rank 0 searches, and writes it to output_dir."""
    devices = planner.cluster.devices
    if devices != setup.world.size:
        raise InputError(f"auto3d.init: cluster: it has {devices} devices; the launcher started {setup.world.size}")
    folder = Path(args.output_dir or ".")

    def search() -> str:
        recompute = ("full",) if args.activation_checkpointing else ("none", "full")
        space = setup.space or SearchSpace(partition=("autopipe",), recompute=recompute, shard_optimizer=(False, True))
        plan = planner.search(space, best=1)[0].plan
        folder.mkdir(parents=True, exist_ok=True)
        (folder / PLAN_FILE).write_text(plan.to_json())
        print(
            f"auto3d: {plan_name(plan)}: {planner.predict(plan).seconds:.4g} s predicted for a step; saved as "
            f"{folder / PLAN_FILE}",
            flush=True,
        )
        return plan.to_json()

    return Plan.from_json(of_rank_0(search, "to find the fastest plan"))
