"""Emulated devices: the times of operations, the sizes of messages, and when an operation starts."""

import time
from dataclasses import replace

import pytest
import torch

from auto3d.errors import InputError
from auto3d.partition.cost import analytic
from auto3d.partition.methods.uniform import uniform
from auto3d.partition.stage import cut
from auto3d.runtime.data import Batches
from auto3d.runtime.emulated import DeviceClock, EmulatedStage
from auto3d.runtime.emulation import Emulation
from auto3d.runtime.randomness import Randomness
from auto3d.runtime.stage import StageModule
from auto3d.schedule import build_schedule
from tests.distributed.parity import make_plan
from tests.models import MODELS, captured

CPU = torch.device("cpu")


def costs_of(emulation: Emulation, *, stages: int = 2, schedule: str = "1f1b", **options: str):
    graph = captured("gpt2", 2).graph
    built = build_schedule(schedule, devices=stages, micro_batches=4, **options)
    return emulation.costs(graph, uniform(graph, stages), built)


def test_missing_times_follow_from_the_others():
    given = costs_of(Emulation(forward_s=1.0, backward_s=(2.0, 3.0)))
    assert (given.forward, given.recompute) == ((1.0, 1.0), (1.0, 1.0))
    assert (given.backward, given.backward_input, given.backward_weight) == ((2.0, 3.0), (1.0, 1.5), (1.0, 1.5))
    halves = costs_of(Emulation(backward_input_s=1.0, backward_weight_s=(0.5, 0.25), recompute_s=3.0))
    assert (halves.backward, halves.recompute) == ((1.5, 1.25), (3.0, 3.0))
    one_half = costs_of(Emulation(backward_s=4.0, backward_weight_s=0.0))
    assert (one_half.backward, one_half.backward_input, one_half.backward_weight) == (
        (4.0,) * 2,
        (2.0,) * 2,
        (0.0,) * 2,
    )


def test_the_cost_model_supplies_the_remaining_times():
    model = analytic(captured("gpt2", 2).graph)
    whole = costs_of(Emulation(forward_s=1.0), stages=1)
    assert whole.forward == (1.0,)
    assert whole.backward == pytest.approx((sum(model.backward_s),))
    halved = costs_of(Emulation(backward_s=1.0), schedule="chimera", scale="halving")
    plain = costs_of(Emulation(backward_s=1.0))
    assert halved.forward == pytest.approx([2 * seconds for seconds in plain.forward]), "the graph has half the samples"
    assert halved.backward == plain.backward, "a time in the recipe is that of a whole micro-batch"


def test_a_list_of_wrong_length_and_tensor_parallelism_are_refused():
    two = make_plan("gpt2", dp=1, pp=2)
    for name in ("forward_s", "send_bytes", "sync_bytes"):
        with pytest.raises(InputError, match=f"{name} has 3 values, and the plan 2 stages; it takes a number, or one"):
            Emulation(**{name: (1, 2, 3)}).check_fits(two)
    Emulation(forward_s=(1.0, 2.0), send_bytes=3).check_fits(two)
    with pytest.raises(InputError, match="emulated devices run only tp = 1"):
        Emulation().check_fits(make_plan("gpt2", dp=1, pp=2, tp=2))


@pytest.mark.parametrize("model", ["gpt2", "t5", "reused"])
def test_messages_have_their_true_sizes(model):
    """Every stage sends the names, shapes and types that a real stage sends, forward and backward."""
    build, data = MODELS[model]
    torch.manual_seed(1)
    module = build()
    for parameter in module.parameters():
        parameter.grad = torch.zeros_like(parameter)
    model_captured = captured(model, 2)
    schedule = build_schedule("1f1b", devices=3, micro_batches=1)
    real_stages = cut(model_captured.graph, uniform(model_captured.graph, 3))
    emulated_stages = Emulation().stages(real_stages)
    costs = Emulation(forward_s=0.0, backward_s=0.0).costs(
        model_captured.graph, uniform(model_captured.graph, 3), schedule
    )
    tensors = {**model_captured.exported.constants, **dict(module.named_buffers()), **dict(module.named_parameters())}
    batch = Batches(data, seed=1, global_batch=2, micro_batch_size=2).micro_batch(0, 0, tuple(data.inputs))
    randomness = Randomness(1, first_micro_batch=0, micro_batches=1, device=CPU)
    pairs, values = [], {}
    for real, emulated in zip(real_stages, emulated_stages, strict=True):
        running = StageModule(real, model_captured, tensors, loss_weight=1.0, randomness=randomness, device=CPU)
        waiting = EmulatedStage(emulated, costs, parts=1, recompute=False, clock=DeviceClock(), device=CPU)
        pairs.append((running, waiting))
        received = {transfer.value.name: values[transfer.value.name] for transfer in real.received}
        sent = running.forward(0, received, batch)
        assert described(sent) == described(waiting.forward(0, received, {}))
        assert emulated.inputs == (), "an emulated stage loads nothing"
        values |= sent
    gradients: dict[str, list[torch.Tensor]] = {}
    for running, waiting in reversed(pairs):
        sent_back = running.backward(0, gradients)
        assert described(sent_back) == described(waiting.backward(0, gradients))
        for name, gradient in sent_back.items():
            gradients.setdefault(name, []).append(gradient)
    assert gradients, "this case sends gradients"


def described(tensors: dict[str, torch.Tensor]) -> dict[str, tuple]:
    return {name: (tensor.shape, tensor.dtype) for name, tensor in tensors.items()}


def test_the_recipe_can_set_the_size_of_messages():
    """Then one value goes between two stages, with a gradient if any of the values it replaces has one."""
    stages = cut(captured("t5", 2).graph, uniform(captured("t5", 2).graph, 5))
    mask = replace(stages[2].received[0], value=replace(stages[2].received[0].value, name="mask", differentiable=False))
    stages = (*stages[:2], replace(stages[2], received=(mask, *stages[2].received)), *stages[3:])
    sized = Emulation(send_bytes=(10, 20, 30, 40, 50)).stages(stages)
    before = [(t.source, t.target) for stage in stages for t in stage.received]
    after = [(t.source, t.target) for stage in sized for t in stage.received]
    assert len(before) > len(after) == len(set(before)) == len(set(after))
    for stage in sized:
        for transfer in (*stage.received, *stage.sent):
            assert transfer.value.bytes == 10 * (1 + transfer.source)
            assert transfer.value.differentiable


def test_an_operation_starts_when_its_device_is_free_and_its_inputs_have_arrived():
    clock = DeviceClock()
    begin = clock.free
    clock.work(0.02)
    assert time.perf_counter() >= clock.free == pytest.approx(begin + 0.02)
    with clock.needing():
        while time.perf_counter() < begin + 0.04:
            pass  # this process is busy, and the operation's inputs arrive meanwhile
    clock.work(0.01)
    assert clock.free == pytest.approx(begin + 0.03), "the device has lost no time"
    with clock.needing():
        time.sleep(0.05)  # its inputs have not arrived
    assert clock.free >= begin + 0.09
    clock.work(0.0)
    assert time.perf_counter() >= clock.free
