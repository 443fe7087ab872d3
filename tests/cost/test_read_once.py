"""Inputs that stage 0 reads for other stages, in estimates: the messages are those that lowering posts."""

from collections import Counter
from dataclasses import replace
from functools import cache

import pytest

from auto3d.cluster import Accelerator, Cluster, Link, Node
from auto3d.cost.model import CostModel
from auto3d.cost.training_options import TrainingOptions
from auto3d.cost.work import Work, work_of
from auto3d.partition.merak import shard
from auto3d.partition.stage import cut, input_users
from auto3d.plan import Plan
from auto3d.schedule import schedule_of
from auto3d.schedule.lowering import lower
from auto3d.schedule.operation import Kind
from tests.distributed.parity import make_plan
from tests.models import TRAINED, captured

LINK = Link(latency_s=1e-5, bandwidth=1e8)
PLANS = {
    "four stages": ("guided", {"pp": 4}),
    "two stages": ("guided", {"pp": 2}),
    "several stages per device": ("guided", {"pp": 2, "schedule": "interleaved-1f1b"}),
    "last stage on the first device": ("guided", {"pp": 2, "schedule": "zb-v"}),
    "masks of encoder and decoder": ("t5", {"pp": 4, "schedule": "gpipe"}),
}


def model_of(name: str, *, read_once: bool = True) -> CostModel:
    @cache
    def work(samples: int) -> Work:
        graph = captured(name, samples).graph
        return work_of(graph, shard(graph).bounds)

    node = Node(devices=4, accelerator=Accelerator(), inside=LINK)
    return CostModel(
        Cluster(nodes=(node,), device="cpu"), TrainingOptions(read_once=read_once), lambda samples, _: work(samples)
    )


def plan_of(case: str) -> tuple[str, Plan]:
    model, options = PLANS[case]
    return model, make_plan(model, dp=1, **options)


@pytest.mark.parametrize("case", PLANS)
def test_the_simulated_messages_of_inputs_are_the_lowered_ones(case):
    name, plan = plan_of(case)
    schedule, model = schedule_of(plan), model_of(name)
    stages = cut(captured(name, plan.micro_batch_size).graph, plan.stages, read_once=True)
    transfers = [transfer for stage in stages for transfer in stage.received]
    inputs = TRAINED[name][1].inputs
    sizes = Counter[int]()  # stage -> bytes of the inputs that it gets
    for transfer in transfers:
        if transfer.value.name in inputs:
            sizes[transfer.target] += transfer.value.bytes
    assert sizes, "stage 0 reads for no other stage"
    device = schedule.device_of
    lowered = {
        (message.micro_batch, message.target): LINK.latency_s + sizes[message.target] / LINK.bandwidth
        for program in lower(schedule, transfers)
        for step in program.steps
        for message in step.sends
        if message.kind is Kind.FORWARD and message.source == 0 and message.target > 1 and sizes[message.target]
        if device[0, 0] != device[message.target, 0]
    }
    timeline = model.timeline(plan)
    simulated = {
        (m, message.target): message.time
        for number, messages in timeline.work.inputs.items()
        for message in messages
        for m in timeline.operations[number].micro_batches
    }
    assert simulated == pytest.approx(lowered)
    (activations, *_), (alone, *_) = (model_of(name, read_once=once).costs(plan).messages for once in (True, False))
    assert activations.forward - alone.forward == pytest.approx(sizes[1] / LINK.bandwidth)
    assert activations.backward == alone.backward


@pytest.mark.parametrize("case", PLANS)
def test_reading_for_others_takes_longer_and_more_memory_than_reading_alone(case):
    """The seconds are those of messages alone; the bytes are on both ends."""
    name, plan = plan_of(case)
    once, each = (model_of(name, read_once=read_once).estimate(plan) for read_once in (True, False))
    assert once.seconds >= each.seconds
    assert once.message_s >= each.message_s
    assert once.seconds - each.seconds == pytest.approx(once.message_s - each.message_s)
    assert once.memory[0] >= each.memory[0]
    if name != "guided":  # tokens are small, and the peak is in the update
        return
    assert once.memory[0] > each.memory[0]
    witness = model_of(name).memory.devices(plan)[0]
    tensors = model_of(name).memory.largest(plan, 0, None)
    assert sum(tensor.total for tensor in tensors) == pytest.approx(witness.total, rel=1e-6)
    assert any(tensor.name == "inputs being sent" for tensor in tensors)


def test_stages_read_for_themselves_where_several_ranks_have_the_first():
    name, plan = plan_of("two stages")
    two_pipes = replace(plan, schedule="chimera")
    one, other = (model_of(name, read_once=read_once).estimate(two_pipes) for read_once in (True, False))
    assert one == other


@pytest.mark.parametrize("name", ["guided", "t5", "bert-pretraining", "gpt2", "llama"])
def test_users_of_inputs_are_the_stages_that_load_them(name):
    """The cut finds what stages load by going through their operations, copies of masks included."""
    graph = captured(name, 2).graph
    users = input_users(graph)
    for pp in (2, 4):
        plan = make_plan(name, dp=1, pp=pp)
        for stage, loads in zip(plan.stages, cut(graph, plan.stages), strict=True):
            positions = {position for span in stage.operations for position in range(*span)}
            assert {each for each, at in users.items() if at & positions} == set(loads.inputs)
