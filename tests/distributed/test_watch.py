"""Ranks that watch each other: the slow one is named, others are not, and an iteration can be traced."""

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import pairwise
from time import perf_counter, sleep

import numpy as np
import pytest
import torch
import torch.distributed as dist

from auto3d.data import DataSettings, InputField
from auto3d.partition.methods.uniform import uniform
from auto3d.plan import Plan
from auto3d.runtime.emulated.settings import Emulation
from auto3d.runtime.layout import lay_out_plan
from auto3d.runtime.process.world import join
from auto3d.runtime.settings import TrainingSettings
from auto3d.runtime.training import train
from auto3d.runtime.watch import of_rank as watch
from auto3d.runtime.watch.clock_offset import measure_ahead
from auto3d.runtime.watch.merged_trace import compared, merged
from auto3d.runtime.watch.of_rank import TraceRequest, Watched
from auto3d.runtime.watch.rank_trace import RankTrace
from auto3d.schedule import build_schedule, samples_at_once
from auto3d.schedule.operation import Kind
from auto3d.simulate.simulate import simulate
from tests.distributed.parity import SGD, make_plan
from tests.models import SEQUENCE, TEXT, captured
from tests.soak import soak

MODEL = "llama"  # its stages share no weights, as pipedream needs
TIMES = Emulation(forward_s=0.003, backward_s=0.005, backward_input_s=0.003, backward_weight_s=0.002)
REAL = TrainingSettings(iterations=3, optimizer=SGD, device="cpu", threads_per_rank=1, timeout_s=60)
LONG = Emulation(forward_s=0.04, backward_s=0.08)  # a sleep that ends 5 ms late makes no rank slow
EMULATED = replace(REAL, iterations=9, emulation=LONG)


def plan_of(name: str, *, dp: int, pp: int, tp: int = 1, micro_batches: int = 4) -> Plan:
    schedule = build_schedule(name, devices=pp, micro_batches=micro_batches)
    stages = uniform(captured(MODEL, 2).graph, schedule.stages)
    return make_plan(MODEL, dp=dp, tp=tp, pp=pp, micro_batches=micro_batches, schedule=name, stages=stages)


@contextmanager
def windows(first: int, least_s: float) -> Iterator[None]:
    """The ranks exchange what they saw in other windows; the processes train later tests with the usual ones."""
    usual = watch.FIRST_WINDOW, watch.LEAST_S
    watch.FIRST_WINDOW, watch.LEAST_S = first, least_s
    try:
        yield
    finally:
        watch.FIRST_WINDOW, watch.LEAST_S = usual


def trained(world, plan: Plan, settings: TrainingSettings, trace: TraceRequest | None = None) -> list[Watched]:
    """What a rank saw after each iteration."""
    seen: list[Watched] = []
    train(
        captured(MODEL, samples_at_once(plan)),
        plan,
        settings,
        TEXT,
        world,
        on_iteration=lambda number, result, what: seen.append(what),
        trace=trace,
    )
    return seen


def watched(world, plan: Plan, settings: TrainingSettings, slow: int | None, times: float) -> list[Watched]:
    """What a rank saw after each of 3 windows of 3 iterations; the device of rank ``slow`` takes ``times`` as long."""
    if world.rank == slow:
        emulation = settings.emulation
        longer = {name: times * getattr(emulation, name) for name in ("forward_s", "backward_s")}
        settings = replace(settings, emulation=replace(emulation, **longer))
    with windows(3, 0.0):
        return trained(world, plan, settings)


@pytest.mark.parametrize(
    ("name", "dp", "pp", "slow", "stages"),
    [
        ("1f1b", 2, 2, None, set()),
        ("1f1b", 2, 2, 3, {1}),
        *soak(("1f1b", 3, 1, 1, {0})),
        ("chimera", 1, 2, 1, {0, 1}),  # both devices run both stages, on different pipes
        ("1f1b", 1, 2, 1, set()),  # no other rank runs its stage
    ],
)
def test_a_slow_rank_is_named_and_no_other(processes, name, dp, pp, slow, stages):
    plan = plan_of(name, dp=dp, pp=pp, micro_batches=2)
    settings = EMULATED if slow is None else replace(EMULATED, iterations=6)  # named after 2 windows
    ranks = processes.run(plan.ranks, watched, plan, settings, slow, 2.0)
    assert all(seen == ranks[0] for seen in ranks), "every rank sees the same"
    assert len(ranks[0]) == settings.iterations
    last = ranks[0][-1]
    assert last.peak_bytes is not None
    if not stages:
        assert not any(seen.slow for seen in ranks[0])
        return
    (named,) = last.slow
    assert named.rank == slow
    assert named.stage in stages
    assert named.kind in (Kind.FORWARD, Kind.BACKWARD)
    assert 1.5 < named.ratio < 4, "it takes twice as long; the others' sleeps end late on a busy machine"
    assert f"rank {slow} on {named.host} is slow: its {named.kind} of stage {named.stage}" in str(named)


class Late:
    """Samples of which each takes 20 ms to read on rank 1."""

    def __len__(self) -> int:
        return 64

    def __getitem__(self, sample: int) -> dict[str, np.ndarray]:
        if dist.get_rank() == 1:
            sleep(0.02)
        return {"input_ids": np.full(SEQUENCE, sample), "labels": np.full(SEQUENCE, sample)}


def reading(world, plan: Plan, data: DataSettings) -> list[Watched]:
    """What a rank saw after each of 2 windows of 3 iterations."""
    seen: list[Watched] = []
    with windows(3, 0.0):
        train(
            captured(MODEL, samples_at_once(plan)),
            plan,
            replace(REAL, iterations=6),
            data,
            world,
            on_iteration=lambda number, result, what: seen.append(what),
        )
    return seen


def test_stages_that_wait_for_data(processes):
    """Rank 1 sleeps 8 times 20 ms of an iteration, which computes a few ms."""
    column = InputField(kind="column", shape=(SEQUENCE,))
    late = DataSettings(source=f"{__name__}:Late", inputs={"input_ids": column, "labels": column})
    plan = plan_of("1f1b", dp=1, pp=2)
    first, other = processes.run(2, reading, plan, late)
    assert first == other
    assert [watched.slow_data is None for watched in first] == [True] * 5 + [False], "it is said after two windows"
    slow = first[-1].slow_data
    assert slow.rank == 1
    assert 0.1 < slow.share <= 1
    share = f"reading takes {100 * slow.share:.0f} % of an iteration on rank 1 on {slow.host}"
    assert f"stages wait for data: {share}" in str(slow)


# Stops the process that started it for 2 of each 2.5 ms, shorter than an operation, until its input is closed.
THROTTLE = """
import os, select, signal, sys, time
while not select.select([sys.stdin], [], [], 0)[0]:
    os.kill(os.getppid(), signal.SIGSTOP)
    time.sleep(0.002)
    os.kill(os.getppid(), signal.SIGCONT)
    time.sleep(0.0005)
"""


def throttled(world, plan: Plan, settings: TrainingSettings) -> list[Watched]:
    """What a rank saw; rank 1 does not run most of the time, as in a container with a quota of processor time."""
    throttle = None
    if world.rank == 1:
        throttle = subprocess.Popen([sys.executable, "-c", THROTTLE], stdin=subprocess.PIPE)
    try:
        with windows(5, 0.1):
            return trained(world, plan, settings)
    finally:
        if throttle is not None:
            throttle.communicate()


def test_a_rank_that_is_throttled_is_named(processes):
    plan = plan_of("1f1b", dp=2, pp=1)
    seen = processes.run(2, throttled, plan, replace(REAL, iterations=30))[0]
    assert any([slow.rank for slow in each.slow] == [1] for each in seen)


def traced(world, plan: Plan, settings: TrainingSettings, folder) -> list[Watched]:
    request = TraceRequest(iterations=(0, 3), warmup=1, folder=folder)
    return trained(world, plan, settings, request)


@pytest.mark.parametrize(
    ("name", "dp", "tp", "pp"),
    [("zb-h1", 1, 2, 2), *soak(("pipedream", 1, 1, 2), ("1f1b", 2, 1, 2), ("chimera", 1, 1, 4))],
)
def test_a_trace_has_the_operations_of_the_schedule_in_order(processes, tmp_path, name, dp, tp, pp):
    plan = plan_of(name, dp=dp, tp=tp, pp=pp)
    settings = REAL if name != "pipedream" else replace(REAL, optimizer=replace(SGD, clip_norm=0.0))
    seen = processes.run(plan.ranks, traced, plan, settings, tmp_path)[0]
    found = {each.traced.iteration: each.traced.files for each in seen if each.traced is not None}
    assert list(found) == ([2, 3] if name != "pipedream" else [3])  # pipedream's iterations overlap: one program
    schedule = lay_out_plan(captured(MODEL, samples_at_once(plan)), plan, settings).schedule
    for files in found.values():
        ranks = [RankTrace.read(file) for file in files]
        graph = captured(MODEL, samples_at_once(plan)).graph
        timeline = simulate(schedule, TIMES.costs(graph, plan.stages, schedule, dp=dp))
        events = merged(ranks, timeline, tp=tp)["traceEvents"]
        for rank in ranks:
            assert rank.rank in plan.placement[rank.device]
            of_rank = [event for event in events if event["pid"] == rank.rank]
            operations = [event for event in of_rank if event.get("cat") == "operation"]
            assert [each["name"] for each in operations] == [str(each) for each in schedule.operations[rank.device]]
            for each, later in pairwise(operations):
                assert each["ts"] >= 0
                assert each["ts"] + each["dur"] <= later["ts"] + 1e-3, "operations of a device overlap"
            profiled = {(event["name"], round(event["ts"], -4)) for event in of_rank if event["ph"] == "X"}
            assert {"aten::addmm", "aten::mm", "aten::linear"} & {name for name, _ in profiled}
            annotated = [event for event in of_rank if event.get("cat") == "user_annotation"]
            by_name = {each["name"]: each for each in operations}
            if name != "pipedream":  # its updates of several iterations have one name
                apart = [each["ts"] - by_name[each["name"]]["ts"] for each in annotated if each["name"] in by_name]
                assert len(apart) == len(operations)
                # A busy core may be taken away between the two; it is not each time.
                assert min(map(abs, apart)) < 1e3, "the profiler's clock is not aligned"
        simulated = {event["name"] for event in events if event["pid"] >= 1_000_000 and event["ph"] == "X"}
        assert {str(each) for each in schedule.operations[0]} <= simulated
        rows = compared(ranks, timeline)
        assert {(row.stage, row.kind) for row in rows} == {
            (each.stage, each.kind) for device in schedule.operations for each in device if each.kind is not Kind.SYNC
        }
        assert all(row.measured_s >= 0 and row.predicted_s is not None for row in rows)
        forwards = [row for row in rows if row.kind is Kind.FORWARD]
        assert all(row.predicted_s == pytest.approx(TIMES.forward_s) for row in forwards)


def ahead(world, by_s: float) -> float:
    join(world, device=torch.device("cpu"), timeout_s=60)
    if dist.get_rank() == 2:
        return 0.0
    shift = by_s if dist.get_rank() else 0.0
    return measure_ahead(1, lambda: perf_counter() + shift)


def test_the_clock_of_another_machine_is_found(processes):
    assert processes.run(3, ahead, 12.5)[1] == pytest.approx(12.5, abs=2e-3)
