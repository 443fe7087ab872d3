"""Training with inputs that a thread makes ahead equals training without it, for all kinds of programs."""

from collections.abc import Mapping, Sequence

import pytest
import torch

from auto3d.partition.methods.uniform import uniform
from auto3d.runtime.samples import inputs
from tests.distributed import asynchronous
from tests.distributed.parity import SGD, make_plan, run_rank
from tests.models import captured
from tests.soak import soak


class OwnMemory:
    """The memory of a CPU, treated like that of another device."""

    def begin_thread(self) -> None:
        pass

    def empty_pinned(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype)

    def queue_copy(self, tensors: Mapping[str, torch.Tensor]) -> tuple[dict[str, torch.Tensor], "OwnMemory"]:
        return {name: tensor.clone() for name, tensor in tensors.items()}, self

    def synchronize(self) -> None:
        pass


def with_a_thread(world, train, *arguments):
    before = inputs.pinned_memory_of
    inputs.pinned_memory_of = lambda device: OwnMemory()
    try:
        return train(world, *arguments)
    finally:
        inputs.pinned_memory_of = before


@pytest.mark.parametrize(
    ("schedule", "stages", "dp"), [("1f1b", 2, 2), ("interleaved-1f1b", 4, 1), *soak(("chimera", 2, 1), ("zb-v", 4, 1))]
)
def test_synchronous(processes, schedule, stages, dp):
    """Each iteration is one program."""
    cuts = uniform(captured("gpt2", 2).graph, stages)
    plan = make_plan("gpt2", dp=dp, pp=2, schedule=schedule, stages=cuts)
    right = processes.run(dp * 2, run_rank, "gpt2", plan, SGD)
    found = processes.run(dp * 2, with_a_thread, run_rank, "gpt2", plan, SGD)
    for one, other in zip(right, found, strict=True):
        assert [each["result"] for each in one["history"]] == [each["result"] for each in other["history"]]


def test_asynchronous(processes):
    """All iterations are one program."""
    plan = make_plan("llama", dp=1, pp=2, schedule="pipedream")
    right = processes.run(2, asynchronous.run_rank, "llama", plan)
    found = processes.run(2, with_a_thread, asynchronous.run_rank, "llama", plan)
    assert [each["results"] for each in right] == [each["results"] for each in found]
