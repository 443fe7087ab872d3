"""Every rank of a plan is built and runs on a fake GPU, which refuses what a real one would refuse.

The tests find tensors on mixed devices, the meta device of the capture, tensors that NCCL refuses, draws from an
unseeded generator, communicators that are made between messages, ranks that disagree about their messages, and code in
which the process waits for its device without a deadline.
"""

from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from graphlib import TopologicalSorter
from multiprocessing import get_context
from typing import Any
from unittest.mock import patch

import pytest
import torch

from auto3d.capture.model import CapturedModel, capture
from auto3d.plan import Plan
from auto3d.runtime.backend import RealBackend
from auto3d.runtime.executor import Executor
from auto3d.runtime.messages import gradient_sync
from auto3d.runtime.messages.exchange import Exchange
from auto3d.runtime.randomness import Randomness
from auto3d.runtime.samples.same_samples import SameSamples
from auto3d.runtime.settings import OptimizerSettings, TrainingSettings
from auto3d.runtime.stage import program as stage_program
from auto3d.runtime.stage.module import StageModule
from auto3d.schedule import SCHEDULES, samples_at_once
from tests import models
from tests.distributed import grid
from tests.distributed.asynchronous import NO_CLIPPING
from tests.distributed.parity import ADAMW, SGD, make_plan
from tests.distributed.test_uneven import make_plan as make_uneven_plan
from tests.models import TRAINED, captured
from tests.runtime import fake_gpu
from tests.runtime.fake_gpu import Record, Refused
from tests.soak import soak

pytestmark = pytest.mark.skipif(
    torch.backends.cuda.is_built(),
    reason="a backward in torch's CUDA build asks the driver about the device of a fake tensor; `make cuda` runs ranks",
)

ITERATIONS = 2
WAITS = {  # reads of the loss and the norm, once the device has finished under a deadline
    "aten::_local_scalar_dense in totals.py:reduce",
    "aten::_local_scalar_dense in totals.py:_next",
    "an event in loading.py:_prefetch",  # in the thread that prefetches inputs
}
ON_CPU = {  # code that computes inputs, and AdamW's step count, on the CPU
    "batches.py:<dictcomp>",
    "batches.py:micro_batch",
    "loading.py:_prefetch",
    "executor.py:_update",
}

Made = tuple[str, Plan, OptimizerSettings]  # the name of a model, its plan and its optimizer


def asynchronous(schedule: str) -> Made:
    plan = make_plan("vit", dp=1, pp=2, micro_batches=3, schedule=schedule, options={"iterations": 2})
    return "vit", plan, NO_CLIPPING


def recomputing_partly() -> Made:
    model = "resnet-transformers"
    plan = make_plan(model, dp=1, pp=2, micro_batches=2, options={"recompute": "full"})
    return model, grid.kept_fractions_of(captured(model, 2).graph, plan).plan(0.5), SGD


def sharing_the_optimizer() -> Made:
    return "gpt2", replace(make_plan("gpt2", dp=2, pp=1, micro_batches=2), shard_optimizer=True), ADAMW


def two_stages(model: str, schedule: str, optimizer: OptimizerSettings = SGD, **options: str | int) -> Made:
    stages = None
    if schedule in ("interleaved-1f1b", "zb-v"):
        stages = grid.uniform(captured(model, 2).graph, 4)
    plan = make_plan(model, dp=1, pp=2, micro_batches=2, schedule=schedule, options=options, stages=stages)
    return model, plan, optimizer


def of_replicas() -> Made:
    return "vit", make_uneven_plan("vit", [2, 1], micro_batch_size=4, micro_batches=2), SGD


def data_parallel() -> Made:
    return "residual", make_plan("residual", dp=2, pp=2, micro_batches=2, schedule="gpipe"), SGD


SAMPLE: dict[str, Callable[[], Made]] = {
    "adamw": partial(two_stages, "gpt2-dropout", "1f1b", ADAMW, recompute="full"),
    "data parallel, several types": data_parallel,
    "split backward, skips": partial(two_stages, "t5-dropout", "zb-h1"),
    "several stages on a device": partial(two_stages, "bert-dropout", "zb-v"),
    "two pipes": partial(two_stages, "twins", "chimera", scale="direct"),
    "batch statistics, recomputed partly": recomputing_partly,
    "bfloat16, complex numbers, a loss used again": partial(two_stages, "averaging", "gpipe"),
    "replicas of a stage": of_replicas,
    "an optimizer that ranks share": sharing_the_optimizer,
    "slices of the sequence": partial(two_stages, "llama", "seq1f1b", slices=2),
    "an update after each backward": partial(asynchronous, "pipedream"),
    "an update per iteration, overlapping": partial(asynchronous, "pipedream-2bw"),
}


def captured_for_gpus(*arguments: Any, **others: Any) -> CapturedModel:
    """``capture`` as on a node whose torch was built with CUDA."""
    with patch.object(torch.backends.cuda, "is_built", lambda: True):
        return capture(*arguments, **others)


def begin() -> None:
    torch.set_num_threads(1)
    fake_gpu.install()
    models.DEVICE, models.capture = "cuda", captured_for_gpus  # this process only tests GPUs
    SameSamples.check = lambda *_, **__: None  # a rank that runs alone gets sums of its own


@pytest.fixture(scope="module")
def process() -> Iterator[ProcessPoolExecutor]:
    """A separate process, since the stand-ins for CUDA stay in it and autograd starts device threads only once. It is
    forked from the one of conftest.py that has only imported, and so has started none."""
    with ProcessPoolExecutor(1, mp_context=get_context("forkserver"), initializer=begin) as pool:
        yield pool


def run(made: Made) -> list[Record]:
    model, plan, optimizer = made
    settings = TrainingSettings(
        iterations=ITERATIONS, optimizer=optimizer, device="cuda", threads_per_rank=1, timeout_s=60
    )
    return fake_gpu.run_ranks(captured(model, samples_at_once(plan)), plan, settings, TRAINED[model][1])


def run_sample(name: str) -> list[Record]:
    return run(SAMPLE[name]())


def assert_sound(records: list[Record]) -> None:
    """Assert that ranks only wait and compute on the CPU where they may, and agree about everything they exchange."""
    for number, record in enumerate(records):
        assert record.waits <= WAITS, f"rank {number}"
        assert record.on_cpu <= ON_CPU, f"rank {number}"
        assert len(record.results) == ITERATIONS
        assert record.groups == records[0].groups, f"rank {number} makes other process groups"
    for number, record in enumerate(records):
        for (group, source, target), messages in record.sent.items():
            assert source == number
            assert messages == records[target].received.get((group, source, target))
        for (group, source, target), messages in record.received.items():
            assert target == number
            assert messages == records[source].sent.get((group, source, target))
        for group, calls in record.collectives.items():
            for member in records[0].groups[group][0]:
                assert records[member].collectives.get(group) == calls, f"group {group}: ranks {number} and {member}"
    connected = TopologicalSorter()
    for record in records:
        for earlier, later in zip(record.connected, record.connected[1:], strict=False):
            connected.add(later, earlier)
    connected.prepare()  # raises CycleError if two ranks connect in opposite orders


SOAK = (  # another training of the sample, or tests/distributed, exchanges the same
    "data parallel, several types",
    "several stages on a device",
    "bfloat16, complex numbers, a loss used again",
    "an update after each backward",
)


@pytest.mark.parametrize("name", [*(name for name in SAMPLE if name not in SOAK), *soak(*SOAK)])
def test_ranks_on_fake_gpus(process, name):
    assert_sound(process.submit(run_sample, name).result())


# Faults that the fake GPU finds


def gradients_left_on_the_cpu() -> AbstractContextManager:
    return patch.object(gradient_sync, "_flat_gradients", partial(_gradients_on_the_cpu, gradient_sync._flat_gradients))


def _gradients_on_the_cpu(make: Callable, *arguments: object) -> torch.Tensor:
    return make(*arguments).cpu()


def buffers_left_on_the_cpu() -> AbstractContextManager:
    made = RealBackend.state

    def state(*arguments: object, **options: object) -> dict[str, torch.Tensor]:
        tensors = made(*arguments, **options)
        return {name: t if isinstance(t, torch.nn.Parameter) else t.cpu() for name, t in tensors.items()}

    return patch.object(RealBackend, "state", state)


def the_meta_device_left() -> AbstractContextManager:
    return patch.object(stage_program, "_on_device", lambda arguments, device: arguments)


def gaps_in_what_is_sent() -> AbstractContextManager:
    forward = StageModule.forward

    def spread(self: StageModule, *arguments: object) -> dict[str, torch.Tensor]:
        sent = forward(self, *arguments)
        return {name: value.mT.contiguous().mT if value.dim() > 1 else value for name, value in sent.items()}

    return patch.object(StageModule, "forward", spread)


def the_generator_of_the_cpu() -> AbstractContextManager:
    seed = Randomness.seed

    def seeded(self: Randomness, operation: int, shard: int | None = None) -> None:
        with patch.object(self, "_generator", torch.default_generator):
            seed(self, operation, shard)

    return patch.object(Randomness, "seed", seeded)


def connected_at_the_first_message() -> AbstractContextManager:
    return patch.object(Exchange, "_connect", lambda exchange, program: None)


FAULTS = {
    gradients_left_on_the_cpu: "nccl is given a tensor of cpu",
    buffers_left_on_the_cpu: "is on cpu",
    the_meta_device_left: "meta",
    gaps_in_what_is_sent: "strides",
    the_generator_of_the_cpu: "without a seed",
    connected_at_the_first_message: "connects ranks",
}


def run_with(fault: Callable[[], AbstractContextManager], model: str) -> str:
    with fault():
        try:
            run((model, make_plan(model, dp=2, pp=2, micro_batches=2), SGD))
        except (Refused, RuntimeError) as error:
            return str(error)
    return "nothing was found"


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_a_fault_is_found(process, fault):
    model = "resnet-transformers" if fault is buffers_left_on_the_cpu else "gpt2-dropout"
    found = process.submit(run_with, fault, model).result()
    assert FAULTS[fault] in found


def waits_with_a_value_read() -> set[str]:
    """The waits of a run whose forward reads a value, so that the process waits for its device in each micro-batch."""
    take_loss, forward = Executor._take_loss, StageModule.forward

    def reading(self: StageModule, *arguments: object) -> dict[str, torch.Tensor]:
        sent = forward(self, *arguments)
        if any(bool(value.isnan().any()) for value in sent.values()):
            raise AssertionError
        return sent

    def assigning(self: Executor, iteration: int) -> torch.Tensor:
        loss = torch.zeros((), dtype=torch.float64, device=fake_gpu.DEVICE)
        loss[()] = 1.0  # torch copies the number from the CPU
        return take_loss(self, iteration) + loss

    with patch.object(StageModule, "forward", reading), patch.object(Executor, "_take_loss", assigning):
        return set().union(*(record.waits for record in run(two_stages("residual", "1f1b"))))


def test_code_in_which_the_process_waits_is_found(process):
    found = process.submit(waits_with_a_value_read).result() - WAITS
    assert {wait.partition(" in ")[0] for wait in found} == {"aten::_local_scalar_dense", "cpu to cuda"}


# The whole grid


def run_cell(position: int) -> list[Record]:
    cell = grid.pairwise()[position]
    return run((cell.model, grid.plan_of(cell), SGD))


@pytest.mark.soak
@pytest.mark.timeout(3600)
def test_the_pairwise_cover_of_the_grid(process):
    cells = grid.pairwise()
    for position in range(len(cells)):
        records = process.submit(run_cell, position).result()
        assert_sound(records)


def run_model(model: str, optimizer: OptimizerSettings) -> list[Record]:
    return run((model, make_plan(model, dp=1, pp=2), optimizer))


@pytest.mark.soak
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("model", TRAINED)
def test_every_model(process, model):
    assert_sound(process.submit(run_model, model, ADAMW).result())


def run_asynchronous(schedule: str, dp: int, pp: int, iterations: int) -> list[Record]:
    plan = make_plan(
        "vit-dropout", dp=dp, pp=pp, micro_batches=2 * pp, schedule=schedule, options={"iterations": iterations}
    )
    return run(("vit-dropout", plan, NO_CLIPPING))


@pytest.mark.soak
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("schedule", [name for name, family in SCHEDULES.items() if family.asynchronous])
@pytest.mark.parametrize(("dp", "pp"), [(2, 2), (1, 4)])
def test_asynchronous_schedules(process, schedule, dp, pp):
    for iterations in (1, 2):
        assert_sound(process.submit(run_asynchronous, schedule, dp, pp, iterations).result())


def run_uneven(model: str, replicas: list[int], schedule: str) -> list[Record]:
    return run((model, make_uneven_plan(model, replicas, schedule=schedule), SGD))


@pytest.mark.soak
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "early-recompute", "zb-h1"])
@pytest.mark.parametrize("replicas", [[2, 1], [1, 3], [1, 2, 1], [2, 2]], ids=str)
@pytest.mark.parametrize("model", ["gpt2", "t5"])
def test_replicas_of_stages(process, model, replicas, schedule):
    assert_sound(process.submit(run_uneven, model, replicas, schedule).result())
