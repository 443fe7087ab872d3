"""Settings of emulated devices: how long operations take, which only wait, and how large or how long messages are.

The devices themselves are in backend.py. This file imports no torch, for commands that only plan.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from itertools import pairwise
from math import lcm

from auto3d.capture.graph import Graph, Value
from auto3d.errors import InputError
from auto3d.partition.cost import analytic
from auto3d.partition.stage import Stage, Transfer, cut, same_stages
from auto3d.plan import Plan, StagePlan
from auto3d.schedule.combinations import EMULATED, check_together, divisions_of
from auto3d.schedule.operation import Schedule
from auto3d.simulate.costs import Costs, MessageCost

PerStage = float | tuple[float, ...] | None


@dataclass(frozen=True, kw_only=True)
class Emulation:
    """Times of operations and sizes of messages: one number for all stages, or a tuple with one number per stage.

    None stands for the times of the analytic cost model and for the true sizes. Times are for one whole micro-batch. If
    a half of the backward is not set, it takes half of the backward's time; if only both halves are set, the backward
    takes their sum. If the recomputation is not set, it takes that fraction of the forward's time that is not kept.
    Under tensor parallelism they are the times of one rank, without its collectives. Each of r replicas of a stage
    takes 1/r of the stage's times, and all of them together send ``send_bytes``.
    """

    forward_s: PerStage = None
    backward_s: PerStage = None
    backward_input_s: PerStage = None
    backward_weight_s: PerStage = None
    recompute_s: PerStage = None
    send_bytes: PerStage = None  # size of what a stage sends to a later stage per micro-batch, and of its gradient
    send_s: PerStage = None  # time of such a message, which then carries only when it arrives; None: its own time
    sync_bytes: PerStage = None  # size of each gradient all-reduce in which a stage takes part
    sync_s: PerStage = None  # time in which the gradients of a stage add up that several ranks hold; None: its own time
    collective_s: PerStage = None
    """Time of each tensor-parallel collective of one micro-batch; None: real ones of the true sizes."""

    def __post_init__(self) -> None:
        for what in ("send", "sync"):
            if getattr(self, f"{what}_s") is not None and getattr(self, f"{what}_bytes") is not None:
                raise InputError(f"emulation: found {what}_s and {what}_bytes; it takes one of them")

    def each(self, name: str, stages: int) -> tuple[float, ...] | None:
        """The value of key ``name`` for each of ``stages``; raises InputError if it is a tuple of another length."""
        value = getattr(self, name)
        if not isinstance(value, tuple):
            return None if value is None else (value,) * stages
        if len(value) != stages:
            raise InputError(
                f"emulation: {name} has {len(value)} values, and the plan {stages} stages; it takes a number, or one "
                "for each stage"
            )
        return value

    def check(self, plan: Plan) -> None:
        """Raise InputError unless ``plan`` can run on emulated devices, and every key fits it."""
        check_together({*divisions_of(plan), EMULATED})
        self.check_fits(plan.stages)

    def check_fits(self, stages: Sequence[StagePlan]) -> None:
        """Raise InputError unless every key fits ``stages``."""
        for field in fields(self):
            self.each(field.name, len(stages))

    def costs_of_plan(self, plan: Plan, schedule: Schedule, graph_at: Callable[[int], Graph]) -> Costs:
        """The times of ``plan`` in the simulator's form; ``graph_at`` gives the model at a number of samples.

        Each stage has the times of the samples that a replica of it runs.
        """
        samples = plan.micro_batch_size // schedule.sample_parts
        graph = graph_at(samples)

        def of(replicas: int) -> Costs:
            own = graph if replicas == 1 else graph_at(samples // replicas)
            stages = plan.stages if own is graph else same_stages(plan.stages, graph, own)
            return self.costs(own, stages, schedule, dp=plan.dp)

        by_replicas = {replicas: of(replicas) for replicas in dict.fromkeys(stage.replicas for stage in plan.stages)}
        of_stage = [by_replicas[stage.replicas] for stage in plan.stages]

        def per_stage(times: Callable[[Costs], tuple[float, ...]]) -> tuple[float, ...]:
            return tuple(times(costs)[number] for number, costs in enumerate(of_stage))

        return replace(
            of_stage[0],
            forward=per_stage(lambda costs: costs.forward),
            backward=per_stage(lambda costs: costs.backward),
            backward_input=per_stage(lambda costs: costs.backward_input),
            backward_weight=per_stage(lambda costs: costs.backward_weight),
            recompute=per_stage(lambda costs: costs.recompute),
        )

    def costs(self, graph: Graph, stages: Sequence[StagePlan], schedule: Schedule, *, dp: int) -> Costs:
        """The times in the simulator's form; ``graph`` is the model at the samples that one operation of a rank runs.

        All slices of a sequence run those samples, so the graph has the whole micro-batch of a schedule with slices.

        Messages and syncs are 0 in it where they take their own time, and so are collectives. The sum of a weight that
        several stages share is 0. Updates are 0 because there are none.
        """
        model = analytic(graph)
        count = len(stages)
        pieces = cut(graph, stages)
        nodes_of = [stage.nodes for stage in pieces]
        position_of = {node.name: position for position, node in enumerate(graph.nodes)}

        def given(name: str) -> tuple[float, ...] | None:
            times = self.each(name, count)
            return times and tuple(time / stage.replicas for time, stage in zip(times, stages, strict=True))

        def modelled(times: Sequence[float]) -> tuple[float, ...]:
            return tuple(schedule.sample_parts * sum(times[position_of[name]] for name in nodes) for nodes in nodes_of)

        forward = given("forward_s") or modelled(model.forward_s)
        whole, inputs, weights = (given(f"backward{half}_s") for half in ("", "_input", "_weight"))
        if whole is None and inputs is not None and weights is not None:
            whole = tuple(map(sum, zip(inputs, weights, strict=True)))
        whole = whole or modelled(model.backward_s)
        half = tuple(time / 2 for time in whole)
        kept = [sum(sum(model.forward_s[first:last]) for first, last in stage.kept) for stage in stages]
        kept_of_total = zip(kept, modelled(model.forward_s), strict=True)
        dropped = [
            1 - schedule.sample_parts * kept_s / total_s if total_s else 1.0 for kept_s, total_s in kept_of_total
        ]
        recomputed = tuple(time * fraction for time, fraction in zip(forward, dropped, strict=True))
        return Costs(
            forward=forward,
            backward=whole,
            backward_input=inputs or half,
            backward_weight=weights or half,
            recompute=given("recompute_s") or recomputed,
            sync=tuple(
                seconds if ranks > 1 and alone else 0.0
                for seconds, ranks, alone in zip(
                    self.each("sync_s", count) or (0.0,) * count,
                    _holders_of(schedule, stages, dp),
                    _train_alone(graph, pieces),
                    strict=True,
                )
            ),
            update=(0.0,) * count,
            messages=tuple(
                MessageCost(forward=seconds / links, backward=seconds / links)
                for seconds, links in zip(
                    (self.each("send_s", count) or (0.0,) * count)[:-1],
                    (min(stage.replicas, other.replicas) for stage, other in pairwise(stages)),
                    strict=True,
                )
            ),
            speed=(1.0,) * schedule.devices,
        )

    @property
    def has_own_messages(self) -> bool:
        """Whether messages are of ``send_bytes`` or ``send_s``: vectors that any number of replicas can divide."""
        return self.send_bytes is not None or self.send_s is not None

    def stages(self, stages: Sequence[Stage], replicas: Sequence[int], own: int) -> tuple[Stage, ...]:
        """``stages`` as emulated devices run them: without inputs to load.

        ``replicas`` has the number of replicas of each stage; the stages of this rank have ``own``. The replicas of a
        stage together send vectors of ``send_bytes``, if set, rounded up to equal pieces for the replicas of both
        stages. If ``send_s`` is set, each piece is one float64, the time of its arrival.
        """
        sizes = self.each("send_bytes", len(stages))

        def sized(transfers: Sequence[Transfer]) -> tuple[Transfer, ...]:
            return tuple(replace(transfer, value=flat(transfer)) for transfer in _one_between(transfers))

        def flat(transfer: Transfer) -> Value:
            pieces = lcm(replicas[transfer.source], replicas[transfer.target])
            if sizes is None:
                return _flat(transfer.value, max(1, pieces // own), "float64", 8)
            return _flat(transfer.value, max(1, -(-int(sizes[transfer.source]) // pieces) * pieces // own), "uint8", 1)

        if not self.has_own_messages:
            return tuple(replace(stage, inputs=()) for stage in stages)

        return tuple(
            replace(stage, inputs=(), received=sized(stage.received), sent=sized(stage.sent)) for stage in stages
        )


def _holders_of(schedule: Schedule, stages: Sequence[StagePlan], dp: int) -> list[int]:
    """How many ranks of ``dp`` pipelines hold each stage, or one shard of it."""
    homes: list[set[int]] = [set() for _ in range(schedule.stages)]
    for (stage, _), device in schedule.device_of.items():
        homes[stage].add(device)
    return [dp * len(devices) * stage.replicas for devices, stage in zip(homes, stages, strict=True)]


def _train_alone(graph: Graph, stages: Sequence[Stage]) -> list[bool]:
    """Whether each stage trains a parameter that no other stage uses."""
    users = Counter(name for stage in stages for name in graph.trained.intersection(stage.state))
    return [any(users[name] == 1 for name in stage.state) for stage in stages]


def _one_between(transfers: Sequence[Transfer]) -> Iterator[Transfer]:
    """One transfer between each two stages; with a gradient if any transfer has a gradient."""
    between: dict[tuple[int, int], Transfer] = {}
    for transfer in transfers:
        first = between.setdefault((transfer.source, transfer.target), transfer)
        if transfer.value.differentiable and not first.value.differentiable:
            between[transfer.source, transfer.target] = transfer
    yield from between.values()


def _flat(value: Value, size: int, dtype: str, item_bytes: int) -> Value:
    """``value`` with ``size`` elements of ``dtype`` instead."""
    return replace(value, shape=(size,), dtype=dtype, item_bytes=item_bytes)
