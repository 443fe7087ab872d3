"""Emulated devices: the times of operations, the sizes of messages, and when an operation starts."""

import random
import time
from dataclasses import replace

import pytest
import torch

from auto3d.cluster import place_ranks
from auto3d.conversions import Collective, conversion_of
from auto3d.cost.sub_pipelined import sub_pipelined_s
from auto3d.cost.work import TensorExchange
from auto3d.data import Batches
from auto3d.derived.halves import sub_pipelined
from auto3d.derived.shards import tensor_parallel
from auto3d.errors import InputError
from auto3d.partition.cost import analytic
from auto3d.partition.methods.uniform import uniform
from auto3d.partition.stage import cut
from auto3d.plan import Plan, stages_between
from auto3d.runtime.emulated.backend import EmulatedComputation
from auto3d.runtime.emulated.collectives import GivenCollectives
from auto3d.runtime.emulated.device_clock import DeviceClock
from auto3d.runtime.emulated.passes import EmulatedStep, passes_of
from auto3d.runtime.emulated.settings import Emulation
from auto3d.runtime.messages.tensor_group import Pending
from auto3d.runtime.randomness import Randomness
from auto3d.runtime.stage.build import build_stage
from auto3d.runtime.stage.program import ProgramOfStage
from auto3d.schedule import build_schedule
from auto3d.schedule.operation import Kind
from auto3d.share import Share
from tests.models import MODELS, captured

CPU = torch.device("cpu")


def costs_of(emulation: Emulation, *, stages: int = 2, schedule: str = "1f1b", **options: int | str):
    graph = captured("gpt2", 2).graph
    built = build_schedule(schedule, devices=stages, micro_batches=4, **options)
    return emulation.costs(graph, uniform(graph, stages), built, dp=1)


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
    sliced = costs_of(Emulation(backward_s=1.0), schedule="seq1f1b", slices=4)
    assert sliced == plain, "the graph has all the samples"


def test_what_a_stage_keeps_is_a_fraction_of_its_time():
    graph = captured("gpt2", 2).graph
    forward_s = analytic(graph).forward_s
    half = len(graph.nodes) // 2
    stages = [replace(stage, kept=((0, half),)) for stage in uniform(graph, 1)]
    dropped = 1 - sum(forward_s[:half]) / sum(forward_s)
    assert 0.1 < dropped < 0.9
    for name, options in (("1f1b", {}), ("seq1f1b", {"slices": 4})):
        schedule = build_schedule(name, devices=1, micro_batches=4, **options)
        assert Emulation(forward_s=2.0).costs(graph, stages, schedule, dp=1).recompute == pytest.approx((2 * dropped,))


def test_a_replica_has_the_model_s_time_of_its_slice_or_its_part_of_a_given_one():
    graphs = {samples: captured("gpt2", samples).graph for samples in (1, 2, 4)}
    stages = uniform(graphs[4], 2)
    schedule = build_schedule("1f1b", devices=2, micro_batches=4)
    plan = Plan(
        graph=graphs[4].fingerprint,
        dp=1,
        tp=1,
        pp=2,
        global_batch=16,
        micro_batch_size=4,
        schedule="1f1b",
        schedule_options={},
        stages=(replace(stages[0], replicas=4), replace(stages[1], replicas=2)),
        placement=place_ranks(dp=1, pp=2, replicas=[4, 2]),
        seed=1,
    )
    found = Emulation(backward_s=(8.0, 6.0), send_s=5.0, sync_s=1.0).costs_of_plan(plan, schedule, graphs.__getitem__)
    assert (found.backward, found.backward_input) == ((2.0, 3.0), (1.0, 1.5))
    assert [each.forward for each in found.messages] == [2.5], "two pieces travel at the same time"
    assert found.sync == (1.0, 1.0), "replicas hold the same weights"
    alone = [Emulation().costs(graphs[n], uniform(graphs[n], 2), schedule, dp=1).forward for n in (1, 2)]
    assert found.forward == pytest.approx((alone[0][0], alone[1][1]))
    assert alone[0][0] > alone[1][0] / 2, "weights are read whatever the samples"


def test_a_list_of_wrong_length_is_refused():
    for name in ("forward_s", "send_bytes", "sync_bytes"):
        with pytest.raises(InputError, match=f"{name} has 3 values, and the plan 2 stages; it takes a number, or one"):
            Emulation(**{name: (1, 2, 3)}).check_fits(stages_between([0, 1, 2]))
    Emulation(forward_s=(1.0, 2.0), send_bytes=3).check_fits(stages_between([0, 1, 2]))


def test_given_times_of_messages_and_sums_are_in_the_costs():
    """Gradients add up only where several ranks hold a stage, and it trains something that no other stage uses."""
    graph, stages = captured("gpt2", 2).graph, uniform(captured("gpt2", 2).graph, 2)
    emulation = Emulation(send_s=(0.5, 7.0), sync_s=(2.0, 3.0))
    alone = build_schedule("1f1b", devices=2, micro_batches=4)
    for schedule, dp, sync in (
        (alone, 1, (0.0, 0.0)),
        (alone, 2, (2.0, 3.0)),
        (build_schedule("chimera", devices=2, micro_batches=4), 1, (2.0, 3.0)),
    ):
        costs = emulation.costs(graph, stages, schedule, dp=dp)
        assert costs.sync == sync
        assert [(each.latency, each.forward, each.backward) for each in costs.messages] == [(0.0, 0.5, 0.5)]
    frozen = replace(graph, trained=graph.trained - set(cut(graph, stages)[0].state))
    assert emulation.costs(frozen, stages, alone, dp=2).sync == (0.0, 3.0)
    assert Emulation().costs(graph, stages, alone, dp=2).sync == (0.0, 0.0)


def test_a_message_has_a_size_or_a_time():
    with pytest.raises(InputError, match="found send_s and send_bytes; it takes one of them"):
        Emulation(send_s=0.1, send_bytes=8)
    with pytest.raises(InputError, match="found sync_s and sync_bytes; it takes one of them"):
        Emulation(sync_s=(0.1, 0.2), sync_bytes=8)
    Emulation(send_s=0.1, sync_bytes=8)


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
    emulated_stages = Emulation().stages(real_stages, [1] * 3, 1)
    plan_stages = uniform(model_captured.graph, 3)
    costs = Emulation(forward_s=0.0, backward_s=0.0).costs(model_captured.graph, plan_stages, schedule, dp=1)
    tensors = {**model_captured.exported.constants, **dict(module.named_buffers()), **dict(module.named_parameters())}
    batch = Batches(data, seed=1, global_batch=2, micro_batch_size=2).micro_batch(0, 0, tuple(data.inputs))
    randomness = Randomness(1, first_micro_batch=0, micro_batches=1, device=CPU)
    pairs, values = [], {}
    for plan_stage, real, emulated in zip(plan_stages, real_stages, emulated_stages, strict=True):
        running = build_stage([ProgramOfStage(real, model_captured)], tensors, loss_weight=1.0, randomness=randomness)
        passes = passes_of(plan_stage, real, None, costs, parts=1, recompute=False)
        loss = model_captured.graph.loss
        waiting = EmulatedComputation(
            emulated, loss, passes, recompute=False, clock=DeviceClock(), device=CPU
        ).as_stage()
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
    sized = Emulation(send_bytes=(10, 20, 30, 40, 50)).stages(stages, [1] * 5, 1)
    before = [(t.source, t.target) for stage in stages for t in stage.received]
    after = [(t.source, t.target) for stage in sized for t in stage.received]
    assert len(before) > len(after) == len(set(before)) == len(set(after))
    timed = Emulation(send_s=0.1).stages(stages, [1] * 5, 1)
    for stage, with_time in zip(sized, timed, strict=True):
        for transfer in (*stage.received, *stage.sent):
            assert transfer.value.bytes == 10 * (1 + transfer.source)
        for transfer in (*with_time.received, *with_time.sent):
            assert (transfer.value.shape, transfer.value.dtype) == ((1,), "float64"), "the time of its arrival"
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


class Immediate(DeviceClock):
    """The time of a device, without waiting for it."""

    def until(self, end: float) -> None:
        self.free = max(self.free, end)


class WithALateRank:
    """A tensor-parallel group of two. The other rank begins each collective ``late`` seconds after this one."""

    shard, shards = 0, 2

    late = 0.0

    def all_reduce(self, tensor: torch.Tensor, what: str, *, maximum: bool = False) -> Pending:
        assert maximum
        return lambda: tensor + self.late


def seconds_of(compute: list[float], collective: float, *, halves: int, late: float = 0.0) -> float:
    """Seconds of an operation that computes for each of ``compute``, with collectives in between."""
    clock = Immediate()
    begin = clock.free = 1e7
    exchange = TensorExchange(collective=Collective.ALL_REDUCE, position=0, before=True, forward=True, size=4.0)
    steps = [
        EmulatedStep(
            seconds / halves,
            exchange if number < len(compute) - 1 else None,
            (halves * (number - 1) + half,) if number else (),
            1 / halves,
        )
        for number, seconds in enumerate(compute)
        for half in range(halves)
    ]
    (stage,) = Emulation().stages(cut(captured("gpt2", 2).graph, uniform(captured("gpt2", 2).graph, 1)), [1], 1)
    group = WithALateRank()
    collectives = GivenCollectives(group, [collective], clock=clock)
    group.late = late
    passes = {Kind.RECOMPUTE: tuple(steps)}
    emulated = EmulatedComputation(
        stage, "loss", passes, recompute=True, clock=clock, device=CPU, collectives=collectives
    )
    emulated.as_stage().recompute(0)
    return clock.free - begin


def test_collectives_of_a_given_time_come_between_computing():
    compute = [random.Random(seed).random() for seed in range(7)]
    assert seconds_of(compute, 0.5, halves=1) == pytest.approx(sum(compute) + 6 * 0.5)
    assert seconds_of(compute, 0.5, halves=1, late=0.25) == pytest.approx(sum(compute) + 6 * 0.75)


@pytest.mark.parametrize("collective", [0.01, 0.3, 0.5, 2.0])
def test_halves_take_turns_as_in_the_cost_model(collective):
    """Compute of one half runs during the collective of the other, and each link carries one collective at a time."""
    compute = [random.Random(seed).random() for seed in range(7)]
    segments = [(each / 2, collective / 2) for each in compute[:-1]] + [(compute[-1] / 2, 0.0)]
    assert seconds_of(compute, collective, halves=2) == pytest.approx(sub_pipelined_s(segments))


@pytest.mark.parametrize("halved", [False, True])
@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1"])
def test_a_tensor_parallel_stage_computes_as_long_as_its_time_says(schedule, halved):
    """Its collectives are those of the program of a rank, divided among the stages."""
    whole = captured("gpt2", 2)
    tensor = sub_pipelined(tensor_parallel(whole, Share(tp=2))) if halved else tensor_parallel(whole, Share(tp=2))
    built = build_schedule(schedule, devices=3, micro_batches=3)
    plans = tensor.stages(uniform(whole.graph, 3))
    costs = Emulation(forward_s=(1.0, 2.0, 3.0), backward_s=5.0).costs(tensor.program.graph, plans, built, dp=1)
    each = [
        passes_of(plan, stage, tensor, costs, parts=1, recompute=True)
        for plan, stage in zip(plans, cut(tensor.program.graph, plans), strict=True)
    ]
    for kind in (Kind.FORWARD, Kind.BACKWARD, Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT, Kind.RECOMPUTE):
        seconds = [sum(step.seconds for step in passes[kind]) for passes in each]
        assert seconds == pytest.approx(costs.times_of(kind)), kind
    conversions = [conversion_of(node.operator) for node in tensor.program.graph.nodes]
    in_forward = 2 + sum(each is not None and each.forward is not None for each in conversions)  # 2 in the loss
    in_backward = sum(each is not None and each.backward is not None for each in conversions)
    for kind, count in ((Kind.FORWARD, in_forward), (Kind.BACKWARD, in_backward)):
        assert sum(step.collective is not None for passes in each for step in passes[kind]) == count > 6
