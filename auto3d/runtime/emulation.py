"""Emulated devices: all is real but the arithmetic; in its place an operation waits for as long as it is told.

Processes, schedule, executor, messages and gradient syncs are those of real training, and have their true sizes. No
weight is made, no data is loaded, nothing is computed, and so there is no loss. It lets a few cores run as many devices
as they can carry the messages of.
"""

import time
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from math import nan
from resource import RUSAGE_THREAD, getrusage
from typing import Any

import torch
from torch import nn

from auto3d.capture.graph import Graph, Value
from auto3d.errors import InputError
from auto3d.partition.cost import analytic
from auto3d.partition.stage import Stage, Transfer, cut
from auto3d.plan import PlanError, StagePlan
from auto3d.runtime.exchange import Exchange
from auto3d.runtime.gradient_sync import GradientSync, Holders, Share
from auto3d.runtime.lowering import Message, Program
from auto3d.runtime.weight_versions import WeightVersions
from auto3d.schedule.operation import Kind, Schedule
from auto3d.simulate.costs import Costs, Link

PIECE_BYTES = 2**24  # of an all-reduce at a time: the gradients of a large model would not fit here

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
            links=(Link(),) * (count - 1),
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


class DeviceClock:
    """When the emulated device of this rank is free.

    An operation starts when the device is free and its inputs are there, and not later because this process was still
    busy with sending: as on a device that is given its operations ahead.
    """

    def __init__(self) -> None:
        self.free = time.perf_counter()

    def idle(self) -> None:
        """The device had nothing to do until now."""
        self.free = max(self.free, time.perf_counter())

    @contextmanager
    def needing(self) -> Iterator[None]:
        """Inside, this process waits for what the next operation needs; if it was there already, no time was lost."""
        before = _times_slept()
        yield
        if _times_slept() > before:
            self.idle()

    def work(self, seconds: float) -> None:
        """Return when an operation of so many seconds is done."""
        self.free += seconds
        time.sleep(max(0.0, self.free - time.perf_counter()))


def _times_slept() -> int:
    """How often this thread had to wait for something; gloo does not tell whether a message has arrived."""
    return getrusage(RUSAGE_THREAD).ru_nvcsw


class EmulatedStage:
    """In the place of a StageModule. What it returns has true sizes, and is allocated once."""

    def __init__(
        self, stage: Stage, costs: Costs, *, parts: int, recompute: bool, clock: DeviceClock, device: torch.device
    ) -> None:
        self.stage = stage
        self.losses: dict[int, torch.Tensor] = {}  # not numbers
        self.weights = WeightVersions({}, several=False)
        self._seconds = {kind: costs.of(kind)[stage.index] / parts for kind in Kind}
        self._recompute = recompute
        self._recomputed: set[int] = set()  # micro-batches before their backward
        self._clock = clock
        self._sent = _empty((transfer.value for transfer in stage.sent), device)
        self._sent_back = _empty((t.value for t in stage.received if t.value.differentiable), device)

    def forward(
        self, micro_batch: int, received: Mapping[str, torch.Tensor], inputs: Mapping[str, torch.Tensor]
    ) -> dict[str, torch.Tensor]:
        self._work(Kind.FORWARD)
        self.losses[micro_batch] = torch.tensor(nan)
        return self._sent

    def recompute(self, micro_batch: int) -> None:
        self._work(Kind.RECOMPUTE)
        self._recomputed.add(micro_batch)

    def backward(self, micro_batch: int, gradients: Mapping[str, Sequence[torch.Tensor]]) -> dict[str, torch.Tensor]:
        return self._back(Kind.BACKWARD, micro_batch)

    def backward_input(
        self, micro_batch: int, gradients: Mapping[str, Sequence[torch.Tensor]]
    ) -> dict[str, torch.Tensor]:
        return self._back(Kind.BACKWARD_INPUT, micro_batch)

    def backward_weight(self, micro_batch: int) -> None:
        self._work(Kind.BACKWARD_WEIGHT)

    def _back(self, kind: Kind, micro_batch: int) -> dict[str, torch.Tensor]:
        if self._recompute and micro_batch not in self._recomputed:
            self.recompute(micro_batch)
        self._recomputed.discard(micro_batch)
        self._work(kind)
        return self._sent_back

    def _work(self, kind: Kind) -> None:
        self._clock.work(self._seconds[kind])


def _empty(values: Iterable[Value], device: torch.device) -> dict[str, torch.Tensor]:
    return {value.name: torch.zeros(value.shape, dtype=getattr(torch, value.dtype), device=device) for value in values}


class EmulatedExchange(Exchange):
    """Real messages, for whose arrival the device's clock waits."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.clock = DeviceClock()

    def start(self, program: Program) -> None:
        self.clock.idle()
        super().start(program)

    def receive(self, message: Message) -> dict[str, torch.Tensor]:
        with self.clock.needing():
            return super().receive(message)


class EmulatedSync(GradientSync):
    """Real all-reduces of zeros, as many bytes as the gradients have, over one piece of memory.

    ``trained`` are the parameters of this rank's stages, each of which is stood for by one number.
    """

    def __init__(
        self,
        trained: Mapping[str, Value],
        holders: Mapping[str, Holders],
        *,
        sync_bytes: Sequence[float] | None,
        clock: DeviceClock,
        timeout_s: float,
    ) -> None:
        self._trained = trained
        self._sync_bytes = sync_bytes
        self._clock = clock
        numbers = {n: nn.Parameter(torch.zeros((), dtype=getattr(torch, v.dtype))) for n, v in trained.items()}
        super().__init__(numbers, holders, timeout_s=timeout_s)
        self._piece = torch.zeros(PIECE_BYTES // 4)

    def wait(self, stages: Collection[int]) -> None:
        with self._clock.needing():
            super().wait(stages)

    def squared_norm(self) -> float:
        return nan

    def _pieces(self, share: Share) -> list[torch.Tensor]:
        holders, _ = share
        if self._sync_bytes is None:
            size = sum(self._trained[name].bytes for name in self._names[share])
        else:
            size = max(self._sync_bytes[stage] for stage in holders.stages)
        whole, rest = divmod(max(1, int(size) // 4), len(self._piece))
        return [*[self._piece] * whole, *([self._piece[:rest]] if rest else [])]
