"""What devices emulate: how long operations take that only wait, and what messages weigh. (They are in emulated.py.)

It needs no torch, for whoever only plans.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace

from auto3d.capture.graph import Graph
from auto3d.errors import InputError
from auto3d.partition.cost import analytic
from auto3d.partition.stage import Stage, Transfer, cut
from auto3d.plan import PlanError, StagePlan
from auto3d.schedule.operation import Schedule
from auto3d.simulate.costs import Costs, MessageCost

PerStage = float | tuple[float, ...] | None


@dataclass(frozen=True, kw_only=True)
class Emulation:
    """What operations take and messages weigh: a number of every stage or a tuple with one for each; None: the times of
    the analytic cost model, and the true sizes.

    Times are of one whole micro-batch. A half of the backward that is not given takes half of it; a backward of which
    only both halves are given takes their sum; a recomputation that is not given takes the forward's time, or of it the
    share of what is not kept.
    """

    forward_s: PerStage = None
    backward_s: PerStage = None
    backward_input_s: PerStage = None
    backward_weight_s: PerStage = None
    recompute_s: PerStage = None
    send_bytes: PerStage = None  # of what a stage sends to a later one for one micro-batch, and of its gradient
    sync_bytes: PerStage = None  # of each gradient all-reduce that a stage takes part in

    def each(self, name: str, stages: int) -> tuple[float, ...] | None:
        """What is given for each of ``stages``; raises InputError where it is a tuple of another length."""
        value = getattr(self, name)
        if not isinstance(value, tuple):
            return None if value is None else (value,) * stages
        if len(value) != stages:
            raise InputError(
                f"emulation: {name} has {len(value)} values, and the plan {stages} stages; it takes a number, or one "
                "for each stage"
            )
        return value

    def check_fits(self, stages: Sequence[StagePlan]) -> None:
        """Raise InputError unless all that is given fits ``stages``, and they can be emulated."""
        for field in fields(self):
            self.each(field.name, len(stages))
        for number, stage in enumerate(stages):
            if stage.replicas > 1:
                raise PlanError(f"stages: {number} has {stage.replicas} replicas; emulated devices take one of each")

    def costs(self, graph: Graph, stages: Sequence[StagePlan], schedule: Schedule) -> Costs:
        """The times in the form that the simulator takes; ``graph`` is the model at the size that operations run.

        Messages and syncs are 0 in it, since they take what they really take; so are updates, of which there are none.
        """
        model = analytic(graph)
        count = len(stages)
        position_of = {node.name: position for position, node in enumerate(graph.nodes)}

        def modelled(times: Sequence[float]) -> tuple[float, ...]:
            return tuple(
                schedule.parts * sum(times[position_of[name]] for name in stage.nodes) for stage in cut(graph, stages)
            )

        forward = self.each("forward_s", count) or modelled(model.forward_s)
        whole, inputs, weights = (self.each(f"backward{half}_s", count) for half in ("", "_input", "_weight"))
        if whole is None and inputs is not None and weights is not None:
            whole = tuple(map(sum, zip(inputs, weights, strict=True)))
        whole = whole or modelled(model.backward_s)
        half = tuple(time / 2 for time in whole)
        kept = [sum(sum(model.forward_s[first:last]) for first, last in stage.kept) for stage in stages]
        shares = zip(modelled(model.forward_s), kept, strict=True)
        dropped = [1 - schedule.parts * own / total if total else 1.0 for total, own in shares]
        recomputed = tuple(time * share for time, share in zip(forward, dropped, strict=True))
        return Costs(
            forward=forward,
            backward=whole,
            backward_input=inputs or half,
            backward_weight=weights or half,
            recompute=self.each("recompute_s", count) or recomputed,
            sync=(0.0,) * count,
            update=(0.0,) * count,
            messages=(MessageCost(),) * (count - 1),
            speed=(1.0,) * schedule.devices,
        )

    def stages(self, stages: Sequence[Stage]) -> tuple[Stage, ...]:
        """``stages`` as emulated devices run them: without inputs to load, and with messages of the given sizes."""
        sizes = self.each("send_bytes", len(stages))

        def sized(transfers: Sequence[Transfer]) -> tuple[Transfer, ...]:
            return tuple(transfers) if sizes is None else tuple(_of_sizes(transfers, sizes))

        return tuple(
            replace(stage, inputs=(), received=sized(stage.received), sent=sized(stage.sent)) for stage in stages
        )


def _of_sizes(transfers: Sequence[Transfer], sizes: Sequence[float]) -> Iterator[Transfer]:
    """One value between each two stages, of the size given for the first; one that has a gradient, if any has."""
    between: dict[tuple[int, int], Transfer] = {}
    for transfer in transfers:
        known = between.setdefault((transfer.source, transfer.target), transfer)
        if transfer.value.differentiable and not known.value.differentiable:
            between[transfer.source, transfer.target] = transfer
    for transfer in between.values():
        size = int(sizes[transfer.source])
        value = replace(transfer.value, shape=(size,), dtype="uint8", item_bytes=1)
        yield replace(transfer, value=value)
