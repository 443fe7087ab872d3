"""Emulated devices under the executor: their operations, the order of these, and what they do not need."""

import time
from dataclasses import replace
from functools import lru_cache
from itertools import accumulate
from math import isnan

import pytest
import torch
import torch.distributed as dist
from transformers import GPT2Config, GPT2LMHeadModel

from auto3d.capture.model import CapturedModel, capture
from auto3d.cost.work import exchanges_of
from auto3d.derived.local_graph import local_graphs
from auto3d.derived.shards import tensor_parallel
from auto3d.partition.methods.uniform import uniform
from auto3d.plan import NO_OVERLAP, SUB_PIPELINED, Plan
from auto3d.runtime import rank as rank_module
from auto3d.runtime.emulated.device_clock import DeviceClock
from auto3d.runtime.emulated.settings import Emulation
from auto3d.runtime.messages.tensor_group import ProcessTensorGroup
from auto3d.runtime.process.world import join, leave
from auto3d.runtime.rank import build_rank
from auto3d.runtime.replicas import capture_slices
from auto3d.runtime.settings import TrainingSettings
from auto3d.runtime.training import TrainingResult, train
from auto3d.runtime.watch.peak_memory import PeakMemory
from auto3d.schedule import build_schedule, samples_at_once, schedule_of
from auto3d.share import Share
from auto3d.simulate.simulate import simulate
from tests.distributed.parity import SGD, make_plan
from tests.distributed.test_uneven import make_plan as uneven_plan
from tests.models import MODELS, TEXT, captured
from tests.processes import ProcessPool
from tests.soak import soak

TIMES = Emulation(
    forward_s=(0.001, 0.002, 0.001, 0.002),
    backward_s=0.004,
    backward_input_s=0.0015,
    backward_weight_s=0.0025,
    recompute_s=0.003,
)
SETTINGS = TrainingSettings(
    iterations=2, optimizer=SGD, device="cpu", threads_per_rank=1, timeout_s=60, emulation=TIMES
)


def plan_of(
    model: str,
    name: str,
    *,
    dp: int,
    pp: int,
    micro_batches: int,
    tp: int = 1,
    sequence_parallel: bool = False,
    **options,
):
    schedule = build_schedule(name, devices=pp, micro_batches=micro_batches, **options)
    return make_plan(
        model,
        dp=dp,
        pp=pp,
        tp=tp,
        sequence_parallel=sequence_parallel,
        micro_batch_size=2 * schedule.sample_parts,
        micro_batches=micro_batches,
        schedule=name,
        options=options,
        stages=uniform(captured(model, 2).graph, schedule.stages),
    )


class Noting(DeviceClock):
    noted: list[float] = []  # noqa: RUF012

    def work(self, seconds: float) -> None:
        self.noted.append(seconds)
        super().work(seconds)


def run_noting(world, model: str, plan: Plan, settings: TrainingSettings) -> tuple[list, list[float]]:
    """Results of two iterations, and the seconds of each piece of work in the first."""
    join(world, device=torch.device("cpu"), timeout_s=60)
    rank_module.DeviceClock, Noting.noted = Noting, []
    try:
        rank = build_rank(captured(model, samples_at_once(plan)), plan, settings, MODELS[model][1], world)
        (first,) = rank.executor.run(rank.programs[0], 0)
        noted = list(Noting.noted)
        assert not rank.parameters
        assert not rank.buffers
        return [first, *rank.executor.run(rank.programs[1], 1)], noted
    finally:
        rank_module.DeviceClock = DeviceClock
        leave()


@pytest.mark.parametrize(
    ("name", "dp", "pp", "micro_batches", "options"),
    [
        ("1f1b", 1, 4, 5, {"recompute": "full"}),
        ("1f1b", 2, 2, 3, {}),
        ("interleaved-1f1b", 2, 2, 4, {"sync": "eager"}),
        ("chimera", 1, 4, 8, {"scale": "doubling", "sync": "eager-opt"}),
        ("zb-h1", 1, 4, 5, {}),
        *soak(("early-recompute", 1, 4, 4, {}), ("chimera", 1, 4, 4, {"scale": "halving"})),
    ],
)
def test_operations_take_their_times_in_the_order_of_the_schedule(processes, name, dp, pp, micro_batches, options):
    """If no device ever waits, the pieces of work on each device end when the simulator's operations do."""
    model = "t5"
    plan = plan_of(model, name, dp=dp, pp=pp, micro_batches=micro_batches, **options)
    schedule = schedule_of(plan)
    graph = captured(model, samples_at_once(plan)).graph
    emulation = replace(TIMES, forward_s=TIMES.forward_s[: schedule.stages])
    settings = replace(SETTINGS, emulation=emulation)
    timeline = simulate(schedule, emulation.costs(graph, plan.stages, schedule, dp=dp))
    ranks = processes.run(plan.ranks, run_noting, model, plan, settings)
    for device, placed in enumerate(plan.placement):
        wanted = [timeline.end[number] - timeline.start[number] for number in timeline.numbers(device)]
        for rank in placed:
            results, noted = ranks[rank]
            assert all(isnan(result.loss) and isnan(result.grad_norm) for result in results), (
                "emulated devices compute neither loss nor norm"
            )
            ends = [round(end, 9) for end in accumulate(noted)]
            assert {round(end, 9) for end in accumulate(wanted)} <= {0.0, *ends}
            assert ends[-1] == pytest.approx(sum(wanted))


class Virtual(DeviceClock):
    """The time of a device from 0, without waiting for it; nothing is late."""

    def __init__(self, ahead: float) -> None:
        super().__init__(ahead)
        self.free = 0.0
        Virtual.ends: list[float] = []

    def idle(self) -> None:
        pass

    def until(self, end: float) -> None:
        self.free = max(self.free, end)

    def work(self, seconds: float) -> None:
        super().work(seconds)
        self.ends.append(self.free)


def run_virtually(world, plan: Plan, settings: TrainingSettings) -> tuple[list[float], float]:
    """When each piece of work of the first iteration ended in the time of this rank's device, and the iteration."""
    join(world, device=torch.device("cpu"), timeout_s=60)
    rank_module.DeviceClock = Virtual
    try:
        rank = build_rank(captured("gpt2", samples_at_once(plan)), plan, settings, MODELS["gpt2"][1], world)
        list(rank.executor.run(rank.programs[0], 0))
        return Virtual.ends, rank.executor._exchange._clock.free
    finally:
        rank_module.DeviceClock = DeviceClock
        leave()


@pytest.mark.parametrize("send_s", [0.0005, 0.006])
@pytest.mark.parametrize(
    ("name", "dp", "pp", "micro_batches", "options"),
    [
        ("1f1b", 2, 2, 3, {}),
        ("interleaved-1f1b", 1, 4, 8, {}),
        ("chimera", 1, 4, 4, {}),
        ("chimera", 1, 4, 6, {"sync": "eager"}),
        ("chimera", 1, 4, 8, {"scale": "doubling"}),
        ("zb-h1", 1, 4, 5, {}),
        *soak(("zb-v", 1, 4, 8, {}), ("chimera", 2, 2, 4, {"scale": "halving"}), ("dualpipe-v", 1, 4, 8, {})),
    ],
)
def test_messages_and_sums_of_given_times_are_those_of_the_simulator(
    processes, name, dp, pp, micro_batches, options, send_s
):
    """Every operation ends, to the rounding of a sum, when the simulator's does, and so does the iteration."""
    plan = plan_of("gpt2", name, dp=dp, pp=pp, micro_batches=micro_batches, **options)
    schedule = schedule_of(plan)
    stages = range(schedule.stages)
    emulation = replace(
        TIMES,
        forward_s=tuple(0.001 * (1 + stage % 3) for stage in stages),
        send_s=tuple(send_s * (1 + stage % 2) for stage in stages),
        sync_s=tuple(0.007 * (1 + stage) for stage in stages),
    )
    graph = captured("gpt2", samples_at_once(plan)).graph
    timeline = simulate(schedule, emulation.costs(graph, plan.stages, schedule, dp=dp))
    ranks = processes.run(plan.ranks, run_virtually, plan, replace(SETTINGS, emulation=emulation))
    for device, placed in enumerate(plan.placement):
        operations = [n for n in timeline.numbers(device) if timeline.end[n] > timeline.start[n]]
        last_pieces = list(accumulate(len(timeline.operations[n].micro_batches) for n in operations))
        for rank in placed:
            ends, _ = ranks[rank]
            assert len(ends) == last_pieces[-1], "one piece of work for each micro-batch of an operation"
            assert [ends[last - 1] for last in last_pieces] == pytest.approx([timeline.end[n] for n in operations])
    assert max(end for _, end in ranks) == pytest.approx(timeline.makespan)


@pytest.fixture(scope="module")
def six_processes():
    with ProcessPool(6) as pool:
        yield pool


@pytest.mark.parametrize("send_s", [0.0005, 0.006])
@pytest.mark.parametrize(
    ("schedule", "replicas", "dp", "options"),
    [
        ("gpipe", [1, 3], 1, {"recompute": "full"}),
        ("1f1b", [3, 2], 1, {}),
        *soak(("1f1b", [1, 3, 2], 1, {}), ("1f1b", [2, 1], 2, {}), ("interleaved-1f1b", [2, 3], 1, {})),
        *soak(("zb-h1", [2, 1, 2], 1, {}), ("seq1f1b", [1, 3], 1, {"slices": 2, "recompute": "full"})),
    ],
)
def test_uneven_replicas_take_the_times_of_the_simulator(six_processes, schedule, replicas, dp, options, send_s):
    """Each replica takes its share of the times of its stage, and all of them end when the simulator's device does."""
    plan = uneven_plan("gpt2", replicas, dp=dp, micro_batches=4, schedule=schedule, options=options)
    stages = range(len(plan.stages))
    emulation = Emulation(
        forward_s=tuple(0.006 * (1 + stage % 3) for stage in stages),
        backward_s=0.018,
        send_s=tuple(send_s * (1 + stage % 2) for stage in stages),
        sync_s=tuple(0.007 * (1 + stage) for stage in stages),
    )
    of_plan = schedule_of(plan)
    costs = emulation.costs_of_plan(plan, of_plan, lambda samples: captured("gpt2", samples).graph)
    assert costs.backward == tuple(0.018 / stage.replicas for stage in plan.stages)
    timeline = simulate(of_plan, costs)
    ranks = six_processes.run(plan.ranks, run_virtually, plan, replace(SETTINGS, emulation=emulation))
    for device, placed in enumerate(plan.placement):
        assert len(placed) == dp * replicas[device]
        wanted = [timeline.end[n] for n in timeline.numbers(device) if timeline.end[n] > timeline.start[n]]
        for rank in placed:
            ends, _ = ranks[rank]
            # A recomputation inside a backward is a piece of work of its own.
            assert set(map(rounded, wanted)) <= set(map(rounded, ends))
            assert ends[-1] == pytest.approx(wanted[-1])
    assert max(end for _, end in ranks) == pytest.approx(timeline.makespan)


def rounded(seconds: float) -> float:
    return round(seconds, 9)


@pytest.mark.parametrize("replicas", [[1, 3], [3, 2]])
def test_messages_between_uneven_replicas_have_their_true_sizes(six_processes, replicas):
    """Each rank sends and receives the pieces of real training, or those of a given size."""
    plan = uneven_plan("gpt2", replicas)
    real = six_processes.run(plan.ranks, run_noting_messages, plan, replace(SETTINGS, emulation=None))
    times = Emulation(forward_s=0.001, backward_s=0.002)
    assert six_processes.run(plan.ranks, run_noting_messages, plan, replace(SETTINGS, emulation=times)) == real
    given = replace(times, send_bytes=600)
    of_given = six_processes.run(plan.ranks, run_noting_messages, plan, replace(SETTINGS, emulation=given))
    assert [[peer for peer, _ in one] for one in of_given] == [[peer for peer, _ in one] for one in real]
    assert sum(size for one in of_given for _, size in one) == 2 * 2 * 600, "2 micro-batches, there and back"


def run_noting_messages(world, plan: Plan, settings: TrainingSettings) -> list[tuple[int, int]]:
    """The pieces of messages that this rank sends in an iteration, in order: to which rank, and bytes."""
    join(world, device=torch.device("cpu"), timeout_s=60)
    noted: list[tuple[int, int]] = []
    isend = dist.isend

    def noting(tensor, peer, **options):
        noted.append((peer, tensor.nbytes))
        return isend(tensor, peer, **options)

    try:
        rank = build_rank(captured("gpt2", samples_at_once(plan)), plan, settings, MODELS["gpt2"][1], world)
        dist.isend = noting
        list(rank.executor.run(rank.programs[0], 0))
        return noted
    finally:
        dist.isend = isend
        leave()


def run_after_pauses(world, plan: Plan, settings: TrainingSettings) -> list[float]:
    """Seconds of each of two iterations, with a pause before each."""
    join(world, device=torch.device("cpu"), timeout_s=60)
    try:
        rank = build_rank(captured("gpt2", samples_at_once(plan)), plan, settings, MODELS["gpt2"][1], world)
        seconds = []
        for iteration, program in enumerate(rank.programs):
            time.sleep(0.3)
            (result,) = rank.executor.run(program, iteration)
            seconds.append(result.seconds)
        return seconds
    finally:
        leave()


def test_time_in_which_nothing_runs_is_no_time_of_a_device(processes):
    """An iteration takes its whole time even if the devices were free long before it began."""
    plan = plan_of("gpt2", "1f1b", dp=1, pp=2, micro_batches=4)
    settings = replace(SETTINGS, emulation=Emulation(forward_s=0.01, backward_s=0.02))
    for seconds in processes.run(2, run_after_pauses, plan, settings):
        assert all(each > 4 * (0.01 + 0.02) for each in seconds), seconds


@lru_cache
def enormous() -> CapturedModel:
    """Two layers of 13 GB each. It is not in MODELS, because other tests make the weights of all those."""
    sizes = {"n_layer": 2, "n_embd": 16384, "n_head": 2, "n_positions": 32, "vocab_size": 256}
    config = GPT2Config(**sizes, use_cache=False, bos_token_id=0, eos_token_id=0)
    return capture(lambda: GPT2LMHeadModel(config), TEXT.input_specs(), 2)


def run_enormous(world, plan: Plan, settings: TrainingSettings) -> tuple[TrainingResult, int]:
    memory = PeakMemory(torch.device("cpu"))
    return train(enormous(), plan, settings, TEXT, world), memory.bytes()


def test_a_model_that_no_machine_here_holds_runs(processes):
    """Embedding and head are tied, so their gradient is summed, with its true number of bytes."""
    graph = enormous().graph
    assert sum(value.bytes for value in graph.parameters.values()) > 25e9
    plan = replace(
        plan_of("gpt2", "1f1b", dp=1, pp=2, micro_batches=2), graph=graph.fingerprint, stages=uniform(graph, 2)
    )
    settings = replace(SETTINGS, emulation=Emulation(forward_s=0.001, backward_s=0.001))
    for result, grown in processes.run(2, run_enormous, plan, settings):
        assert len(result.iteration_s) == settings.iterations
        assert result.loss == result.grad_norm == result.peak_bytes == []
        assert grown < 2**28, "most of this growth comes from the capture"


def summed_bytes(world, plan, settings: TrainingSettings) -> list[int]:
    """Bytes of each gradient all-reduce in which this rank takes part."""
    join(world, device=torch.device("cpu"), timeout_s=60)
    try:
        rank = build_rank(captured("t5", samples_at_once(plan)), plan, settings, MODELS["t5"][1], world)
        sync = rank.executor._sync
        buckets = [bucket for bucket in sync._names if bucket[0] in sync._groups]
        return [sum(piece.nbytes for piece in sync._pieces(bucket)) for bucket in buckets]
    finally:
        leave()


def test_gradient_syncs_have_their_true_sizes(processes):
    plan = plan_of("t5", "chimera", dp=1, pp=4, micro_batches=4)
    real = processes.run(4, summed_bytes, plan, replace(SETTINGS, emulation=None))
    assert processes.run(4, summed_bytes, plan, SETTINGS) == real
    assert all(len(sizes) >= 2 for sizes in real), (
        "a device holds two stages, and another device holds each of them too"
    )
    given = replace(TIMES, sync_bytes=(400, 800, 1200, 2 * 2**24 + 4))
    for sizes in processes.run(4, summed_bytes, plan, replace(SETTINGS, emulation=given)):
        assert set(sizes) <= {400, 800, 1200, 2 * 2**24 + 4}


def run_noting_collectives(world, model: str, plan: Plan, settings: TrainingSettings) -> list[tuple[str, int]]:
    """The tensor-parallel collectives of an iteration of this rank, in order: which, and the bytes of the whole."""
    join(world, device=torch.device("cpu"), timeout_s=60)
    noted: list[tuple[str, int]] = []
    of_group = {name: getattr(ProcessTensorGroup, name) for name in ("all_reduce", "all_gather", "reduce_scatter")}

    def noting(name: str):
        def collective(group, tensor, what, **options):
            noted.append((name, tensor.nbytes * (group.shards if name == "all_gather" else 1)))
            return of_group[name](group, tensor, what, **options)

        return collective

    try:
        rank = build_rank(captured(model, samples_at_once(plan)), plan, settings, MODELS[model][1], world)
        for name in of_group:
            setattr(ProcessTensorGroup, name, noting(name))
        list(rank.executor.run(rank.programs[0], 0))
        return noted
    finally:
        for name, method in of_group.items():
            setattr(ProcessTensorGroup, name, method)
        leave()


@pytest.mark.parametrize(
    ("model", "name", "dp", "pp", "options"),
    [
        ("gpt2", "1f1b", 1, 2, {"recompute": "full", "sequence_parallel": True}),
        *soak(("gpt2", "1f1b", 1, 2, {"recompute": "full"}), ("gpt2", "zb-h1", 1, 2, {"sequence_parallel": True})),
        *soak(("t5", "chimera", 1, 2, {}), ("llama", "1f1b", 2, 1, {})),
        *soak(("gpt2", "1f1b", 1, 2, {"recompute": "full", "tensor_overlap": SUB_PIPELINED})),
        *soak(("t5", "zb-h1", 1, 2, {"tensor_overlap": SUB_PIPELINED})),
    ],
)
def test_tensor_parallel_collectives_are_those_of_real_training(processes, model, name, dp, pp, options):
    overlap = options.get("tensor_overlap", NO_OVERLAP)
    options = {name: value for name, value in options.items() if name != "tensor_overlap"}
    plan = replace(plan_of(model, name, dp=dp, pp=pp, tp=2, micro_batches=4, **options), tensor_overlap=overlap)
    capture_slices(captured(model, samples_at_once(plan)), plan)
    schedule = schedule_of(plan)
    emulation = Emulation(forward_s=0.001, backward_s=0.002)
    real = processes.run(4, run_noting_collectives, model, plan, replace(SETTINGS, emulation=None))
    emulated = processes.run(4, run_noting_collectives, model, plan, replace(SETTINGS, emulation=emulation))
    assert emulated == real
    assert all(len(each) >= 2 * schedule.micro_batches for each in real), real


def test_collectives_take_the_given_time_unless_they_are_hidden(processes):
    """A collective takes as long as the compute before it: in turns, each half hides the other's."""
    plan = plan_of("gpt2", "1f1b", dp=1, pp=1, tp=2, micro_batches=2)
    settings = replace(SETTINGS, emulation=Emulation(forward_s=0.12, backward_s=0.24, collective_s=0.03))
    seconds = []
    for overlap in (NO_OVERLAP, SUB_PIPELINED):
        ranks = processes.run(2, run_after_pauses, replace(plan, tensor_overlap=overlap), settings)
        seconds.append(min(min(each) for each in ranks))
    model = tensor_parallel(captured("gpt2", 2), Share(tp=2))
    collectives = len(exchanges_of(local_graphs(model)[0], 1.0))
    assert seconds[0] > 2 * (0.12 + 0.24 + collectives * 0.03)
    assert 2 * (0.12 + 0.24) < seconds[1] < 0.9 * seconds[0]
