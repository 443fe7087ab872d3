"""A browser for tests of the report, and reports to show in it."""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import pytest

from auto3d.cluster import Accelerator, Cluster, Node, place_ranks
from auto3d.cost.layers import Layer, work_of_layers
from auto3d.cost.model import CostModel
from auto3d.cost.training_options import TrainingOptions
from auto3d.plan import Plan, stages_between
from auto3d.runtime.measurement import Measurement, Status
from auto3d.schedule import build_schedule
from launch.recipe.load import load
from launch.report.data import Report
from launch.report.details import detail_of
from launch.report.rows import front, order, row_of
from launch.report.source import ReportedPlan
from launch.report.throughput import ThroughputColumns

BROWSERS = ("chromium", "chromium-browser", "google-chrome")


@contextmanager
def browser() -> Iterator[Any]:
    """Debian's chromium without a window. Skips the test where there is none, unless AUTO3D_REQUIRE_BROWSER is set."""
    from playwright.sync_api import sync_playwright

    program = next(filter(None, map(shutil.which, (os.environ.get("AUTO3D_BROWSER", ""), *BROWSERS))), None)
    if program is None:
        reason = "no browser: apt-get install chromium"
        if os.environ.get("AUTO3D_REQUIRE_BROWSER"):
            pytest.fail(f"{reason} (AUTO3D_REQUIRE_BROWSER is set)")
        pytest.skip(reason)
    with sync_playwright() as playwright:
        started = playwright.chromium.launch(executable_path=program, args=["--no-sandbox"])
        try:
            yield started
        finally:
            started.close()


def plan_of(schedule: str, *, devices: int, micro_batches: int, dp: int = 1) -> Plan:
    """A plan of one layer per stage."""
    stages = build_schedule(schedule, devices=devices, micro_batches=micro_batches).stages
    return Plan(
        graph="a graph", dp=dp, tp=1, pp=devices, global_batch=2 * dp * micro_batches, micro_batch_size=2,
        schedule=schedule, stages=stages_between(range(stages + 1)), placement=place_ranks(dp=dp, pp=devices), seed=0,
    )  # fmt: skip


def model_of(stages: int, devices: int, *, memory_bytes: float | None = None) -> CostModel:
    """The cost model of so many layers, of which none is like another, on one node."""
    layers = [
        Layer(parameters=1e6 * n, saved=1e5 + n, flops=1e9 * n, output=1e4, traffic=1e5) for n in range(1, stages + 1)
    ]
    node = Node(devices=devices, accelerator=Accelerator(memory_bytes=memory_bytes))
    return CostModel(
        Cluster(nodes=(node,), device="cpu"),
        TrainingOptions(),
        lambda samples, share: work_of_layers(layers, samples, share.tp, precision="float32"),
    )


def report_with(plans: int, *, seed: int = 0, name: str = "made", problem: str = "") -> Report:
    """A report of real plans and predictions; the measured times are random numbers. The last trial failed."""
    random = Random(seed)
    shapes = [
        ("1f1b", 4, 8), ("gpipe", 4, 8), ("chimera", 4, 8), ("interleaved-1f1b", 2, 8), ("1f1b", 8, 16), ("gpipe", 2, 4)
    ]  # fmt: skip
    made, columns = [], ThroughputColumns(load("tiny", []))
    for number in range(plans):
        schedule, devices, micro_batches = shapes[number % len(shapes)]
        plan = replace(plan_of(schedule, devices=devices, micro_batches=micro_batches), seed=number)
        model = model_of(len(plan.stages), devices, memory_bytes=2**30)
        seconds = model.seconds(plan) * random.uniform(0.8, 1.25)
        measurement = Measurement(
            plan=plan, status=Status.OK, iteration_s=[seconds, 1.1 * seconds, 0.9 * seconds], loss=[1.0] * 3,
            grad_norm=[1.0] * 3, tokens_per_sample=128, model_flops=1e12, recomputed_flops=2e11 * (number % 3),
            peak_bytes=[random.randrange(2**28, 2**30)] * plan.ranks,
        )  # fmt: skip
        if number == plans - 1:
            measurement = Measurement(plan=plan, status=Status.FAILED, error=problem or "it failed")
        made.append(ReportedPlan(plan, None, (measurement,), model))
    pairs = sorted(((row_of(one, columns), one) for one in made), key=lambda pair: order(pair[0]))
    rows = [row for row, _ in pairs]
    measured = front([(row.measured_s, row.measured_peak) for row in rows])
    return Report(
        recipe=name, verb="sweep", subject=f"{name}; 8 devices", written="today", measured="Measured in a test.",
        predicted="times are predicted", rates=columns.basis(measured=True, predicted=False),
        remarks=(problem,) if problem else (), rows=rows,
        fronts={"measured": measured, "predicted": front([(row.predicted_s, row.predicted_peak) for row in rows])},
        details=[detail_of(place, one.plan, one.model) for place, (_, one) in enumerate(pairs[:6])],
        refused=[], commands=[],
    )  # fmt: skip


def write(report: Report, file: Path) -> str:
    """The page of ``report`` in ``file``; returns its address."""
    from launch.report.page import page_of

    file.write_text(page_of(report))
    return file.as_uri()
