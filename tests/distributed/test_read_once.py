"""Data that the user's code reads: the first stage reads for all, and the training is still that of one process."""

from collections.abc import Collection
from contextlib import nullcontext
from dataclasses import dataclass, replace

import numpy as np
import pytest
from torch.utils._python_dispatch import _disable_current_modes

from auto3d.cost.memory.device import DeviceMemory
from auto3d.data import BatchSlice, DataSettings
from auto3d.data.batches import Batches
from auto3d.data.interface import Reading
from auto3d.plan import Plan
from auto3d.runtime.process.world import World
from auto3d.schedule import samples_at_once, schedule_of
from tests.distributed.parity import ADAMW, assert_parity, make_plan, plain_pytorch, run_rank
from tests.live_tensors import Peak, peak_of_rank
from tests.models import TRAINED, captured


@dataclass(frozen=True)
class ReadOnce:
    """``settings`` as data that one rank reads for all stages; ``may_read`` says whether this rank may."""

    settings: DataSettings
    may_read: bool

    read_once = True
    is_by_position = True
    is_read_anew = False
    incomplete = None
    lengths = None

    @property
    def may_ignore_targets(self) -> bool:
        return self.settings.may_ignore_targets

    def begins_epoch(self, iteration: int) -> bool:
        return False

    def reads(self, names: Collection[str]) -> bool:
        return self.settings.reads(names)

    def micro_batches(self, part: BatchSlice) -> "ReadOnceBatches":
        return ReadOnceBatches(self.settings.micro_batches(part), tuple(self.settings.inputs), self.may_read)


@dataclass(frozen=True)
class ReadOnceBatches:
    batches: Batches
    inputs: tuple[str, ...]
    may_read: bool

    def read(self, iteration: int, index: int, names: Collection[str]) -> Reading:
        assert self.may_read == bool(names), "the first stage reads, and others only compare"
        # What is read only to be compared takes no memory of the device.
        with nullcontext() if names else _disable_current_modes():
            found = self.batches.read(iteration, index, self.inputs)
        return replace(found, inputs={name: found.inputs[name] for name in names})

    def fingerprints(self, iteration: int, index: int, replica: int | None = None) -> np.ndarray | None:
        assert self.may_read or replica is None, "the first stage reads what its neighbour reads"
        return self.batches.fingerprints(iteration, index, replica)


def run(world: World, model: str, plan: Plan) -> dict:
    device, _ = plan.position(world.rank)
    first = {home for (stage, _), home in schedule_of(plan).device_of.items() if stage == 0}
    return run_rank(world, model, plan, ADAMW, data=ReadOnce(TRAINED[model][1], device in first))


PLANS = {
    "1f1b": ("gpt2", lambda: make_plan("gpt2", dp=1, pp=4)),
    "masks of encoder and decoder": ("t5", lambda: make_plan("t5", dp=1, pp=4)),
    "dropout": ("gpt2-dropout", lambda: make_plan("gpt2-dropout", dp=2, pp=2, schedule="gpipe")),
    "two stages on a device": (
        "bert-pretraining",
        lambda: make_plan("bert-pretraining", dp=1, pp=2, schedule="interleaved-1f1b"),
    ),
    "floating-point inputs": ("residual", lambda: make_plan("residual", dp=1, pp=2)),
    "split backward": ("gpt2", lambda: make_plan("gpt2", dp=1, pp=2, schedule="zb-h1")),
    "first and last stage on a device": ("gpt2", lambda: make_plan("gpt2", dp=1, pp=2, schedule="zb-v")),
    "recomputation": ("llama", lambda: make_plan("llama", dp=1, pp=2, options={"recompute": "full"})),
}


@pytest.mark.parametrize("name", PLANS)
def test_the_first_stage_reads_for_all(name, processes):
    model, make = PLANS[name]
    plan = make()
    captured(model, samples_at_once(plan))
    ranks = processes.run(plan.ranks, run, model, plan)
    assert_parity(
        ranks,
        plain_pytorch(
            model,
            micro_batch_size=samples_at_once(plan),
            optimizer=ADAMW,
            global_batch=plan.global_batch,
            seed=plan.seed,
        ),
    )


def peak(world: World, plan: Plan) -> tuple[Peak, DeviceMemory]:
    device, _ = plan.position(world.rank)
    model = captured("guided", plan.micro_batch_size)
    return peak_of_rank(world, model, ReadOnce(TRAINED["guided"][1], device == 0), plan, ADAMW)


@pytest.mark.parametrize(
    ("pp", "schedule", "micro_batches"),
    [(2, "1f1b", 4), (4, "1f1b", 4), (4, "gpipe", 8), (4, "zb-h1", 4), (2, "interleaved-1f1b", 4)],
)
def test_the_peak_with_large_values_for_other_stages_is_the_estimate(pp, schedule, micro_batches, processes):
    """Within 1 % on every rank; most of what each holds are inputs that the first stage has read for others."""
    plan = make_plan("guided", dp=1, pp=pp, schedule=schedule, micro_batches=micro_batches, micro_batch_size=8)
    captured("guided", 8)
    for rank, (found, predicted) in enumerate(processes.run(pp, peak, plan)):
        assert predicted.total == pytest.approx(found.total, rel=0.01), f"rank {rank}, {found.at}"
        assert rank or predicted.messages > predicted.total / 2
