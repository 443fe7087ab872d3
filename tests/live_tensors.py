"""The bytes that a rank of a real training holds: the memory of every tensor, counted after each operator."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from auto3d.capture.model import CapturedModel
from auto3d.data import DataSettings
from auto3d.plan import Plan
from auto3d.runtime.process.world import World, join, leave
from auto3d.runtime.rank import build_rank
from auto3d.runtime.settings import OptimizerSettings, TrainingSettings
from auto3d.schedule import schedule_of
from auto3d.schedule.operation import Operation


@dataclass(frozen=True)
class Allocation:
    """One tensor that was alive at the peak."""

    nbytes: int
    shape: tuple[int, ...]
    made_in: str  # operation of the schedule; empty before the first
    operator: str  # operator that made the tensor; empty for tensors that were added


@dataclass
class Peak:
    """The largest number of bytes that were alive at once."""

    total: int = 0
    at: str = ""  # operation of the schedule
    operator: str = ""  # operator after which they were counted
    alive: list[Allocation] = field(default_factory=list)


class LiveTensors(TorchDispatchMode):
    """Counts the memory of every tensor that an operator makes, until it is freed; temporaries inside operators do not.

    It is also a StepObserver, so that it knows the operation of the schedule. With ``keeps_tensors``, a peak lists what
    was alive.
    """

    def __init__(self, *, keeps_tensors: bool = False) -> None:
        super().__init__()
        self.peak = Peak()
        self.total = 0  # bytes of all known tensors, including freed ones
        self._keeps_tensors = keeps_tensors
        self._operation = ""
        self._known: dict[int, tuple[StorageWeakRef, Allocation]] = {}

    def begin(self, operation: Operation) -> None:
        self._operation = str(operation)

    def end(self) -> None:
        pass

    def begin_wait(self) -> None:
        pass

    def end_wait(self) -> None:
        pass

    begin_read = end_read = begin_wait

    def add(self, tensor: torch.Tensor, operator: str = "") -> None:
        storage = tensor.untyped_storage()
        known = self._known.get(storage._cdata)
        if known is None or known[0].expired() or known[1].nbytes != storage.nbytes():
            self.total += storage.nbytes() - (known[1].nbytes if known else 0)
            allocation = Allocation(storage.nbytes(), tuple(tensor.shape), self._operation, operator)
            self._known[storage._cdata] = (StorageWeakRef(storage), allocation)

    def forget_peak(self) -> None:
        self.peak = Peak()

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor):
                self.add(leaf, str(func))
        if self.total > self.peak.total:
            self._known = {key: entry for key, entry in self._known.items() if not entry[0].expired()}
            self.total = sum(allocation.nbytes for _, allocation in self._known.values())
            if self.total > self.peak.total:
                alive = [allocation for _, allocation in self._known.values()] if self._keeps_tensors else []
                self.peak = Peak(self.total, self._operation, str(func), alive)
        return result


def peak_of_rank(
    world: World,
    model: CapturedModel,
    data: DataSettings,
    plan: Plan,
    optimizer: OptimizerSettings,
    keeps_tensors: bool = False,
) -> tuple[Peak, Any]:
    """(peak of this rank in its second program, when the optimizer has its state; the runtime's prediction)."""
    settings = TrainingSettings(
        iterations=2 * schedule_of(plan).iterations,
        optimizer=optimizer,
        device="cpu",
        threads_per_rank=1,
        timeout_s=60,
        precision=model.exported.precision,
    )
    join(world, device=torch.device("cpu"), timeout_s=60)
    try:
        live = LiveTensors(keeps_tensors=keeps_tensors)
        with live:
            rank = build_rank(model, plan, settings, data, world)
            for tensor in _held_before(rank):
                live.add(tensor)
            rank.executor.observe(live)
            for number, program in enumerate(rank.programs):
                live.forget_peak()
                list(rank.executor.run(program, number * program.iterations))
        return live.peak, rank.predicted
    finally:
        leave()


def _held_before(rank: Any) -> Iterator[torch.Tensor]:
    yield from chain(rank.parameters.values(), rank.buffers.values())
