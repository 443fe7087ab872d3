"""The figures of a report: Pareto fronts, what a timeline draws, parts of the time, texts without paths."""

import json
import tempfile
from dataclasses import replace
from pathlib import Path
from random import Random

import pytest

from auto3d.runtime.measurement import Measurement, Status
from auto3d.schedule.operation import Kind
from launch.recipe.load import load
from launch.report import details
from launch.report.details import detail_of
from launch.report.rows import front, row_of, with_corrections
from launch.report.source import ReportedPlan
from launch.report.text import embedded, without_folders
from launch.report.throughput import ThroughputColumns
from tests.launch.report.pages import model_of, plan_of

COLUMNS = ThroughputColumns(load("tiny", []))


def test_the_front_is_what_no_other_point_beats():
    random = Random(1)
    for _ in range(200):
        points = [
            (random.choice([None, 1, 2, 3, 4]), random.choice([None, 1, 2, 3, 4])) for _ in range(random.randrange(12))
        ]
        known = [(place, point) for place, point in enumerate(points) if None not in point]
        best = [
            (point, place)
            for place, point in known
            if not any(
                other != point and other[0] <= point[0] and other[1] <= point[1]
                for _, other in known
            )
            and place == min(where for where, other in known if other == point)
        ]  # fmt: skip
        assert front(points) == [place for _, place in sorted(best)]


def test_a_row_is_the_median_of_its_trials_and_names_one_that_failed():
    plan = plan_of("1f1b", devices=2, micro_batches=4)
    trials = [
        Measurement(plan=plan, status=Status.OK, iteration_s=times, peak_bytes=peaks)
        for times, peaks in (([1.0, 2.0, 9.0], [5, 7]), ([4.0, 4.0, 4.5], [6, 6]), ([3.0, 3.0, 3.0], [1, 2]))
    ]
    model = model_of(2, 2)
    row = row_of(ReportedPlan(plan, None, tuple(trials), model), COLUMNS)
    assert (row.measured_s, row.spread_s, row.trials, row.measured_peak) == (3.0, 8.0, 3, 7)
    assert row.samples_per_s == plan.global_batch / 3
    assert row.error == pytest.approx(model.seconds(plan) / 3 - 1)
    failed = Measurement(plan=plan, status=Status.OOM, error="too large")
    row = row_of(ReportedPlan(plan, None, (trials[0], failed), None), COLUMNS)
    assert (row.status, row.problem, row.measured_s, row.predicted_s) == ("oom", "too large", 2.0, None)
    row = row_of(ReportedPlan(plan, None, (failed,), model), COLUMNS)
    assert (row.measured_s, row.measured_peak, row.error) == (None, None, None)


def test_a_machine_without_a_profile_has_predictions_that_the_other_trials_correct():
    plan, model = plan_of("1f1b", devices=2, micro_batches=4), model_of(2, 2)
    predicted = model.seconds(plan)
    rows = [
        row_of(
            ReportedPlan(
                plan, None, (Measurement(plan=plan, status=Status.OK, iteration_s=[times * predicted]),), model
            ),
            COLUMNS,
        )
        for times in (2.0, 3.0, 6.0)
    ]
    assert [row.corrected_s for row in rows] == [None] * 3, "not by itself"
    found = with_corrections(rows)
    assert [row.corrected_s / predicted for row in found] == pytest.approx([18**0.5, 12**0.5, 6**0.5])
    assert all(row.corrected_interval_s[0] < row.corrected_s < row.corrected_interval_s[1] for row in found)
    assert [row.predicted_s for row in found] == [predicted] * 3, "the prediction stays beside it"


def test_throughput_is_that_of_the_trial_or_of_the_prediction(tmp_path):
    """By the code of `auto3d table`; a predicted plan has its cost model's FLOPs and precision."""
    (tmp_path / "peak.yaml").write_text("peak_tflops: {float32: 0.004, float16: 0.008}\nmemory_gb_per_s: 1\n")
    named = [f"cluster.accelerator={tmp_path}/peak.yaml", "prediction.precision=float16"]
    columns = ThroughputColumns(load("tiny", named))
    plan = plan_of("1f1b", devices=2, micro_batches=4)
    model = model_of(2, 2)
    trial = Measurement(
        plan=plan, status=Status.OK, iteration_s=[2.0], peak_bytes=[1, 1], tokens_per_sample=10, model_flops=12e9,
        recomputed_flops=4e9,
    )  # fmt: skip
    measured = row_of(ReportedPlan(plan, None, (trial,), model), columns)
    assert (measured.model_flops_per_s_per_device, measured.hardware_flops_per_s_per_device) == (3e9, 4e9)
    assert (measured.tokens_per_s, measured.mfu) == (10 * plan.global_batch / 2, pytest.approx(0.75))
    predicted = row_of(ReportedPlan(plan, None, (), model), columns)
    per_device = model.flops(plan).model / model.seconds(plan) / 2
    assert predicted.model_flops_per_s_per_device == pytest.approx(per_device)
    assert predicted.mfu == pytest.approx(per_device / 8e9)
    assert predicted.samples_per_s == plan.global_batch / model.seconds(plan)
    emulated = row_of(ReportedPlan(plan, None, (replace(trial, emulated=True),), model), columns)
    assert (emulated.model_flops_per_s_per_device, emulated.mfu) == (3e9, None)


@pytest.mark.parametrize("schedule", ["1f1b", "chimera", "zb-h1", "pipedream"])
def test_a_detail_has_every_operation_and_its_parts_are_the_predicted_time(schedule):
    plan = plan_of(schedule, devices=4, micro_batches=8, dp=2)
    model = model_of(len(plan.stages), 8, memory_bytes=2**34)
    detail = detail_of(3, plan, model)
    timeline = model.timeline(plan)
    computing = [
        number for number, operation in enumerate(timeline.operations) if operation.kind is not Kind.SYNC
    ]  # fmt: skip
    drawn = detail.operations
    assert detail.gap is None
    assert len(drawn.start) == detail.total_operations == len(computing)
    assert sum(drawn.duration) == pytest.approx(sum(timeline.end[n] - timeline.start[n] for n in computing))
    assert sum(detail.parts.values()) == pytest.approx(model.seconds(plan))
    assert [max(curve.held) for curve in detail.memory] == pytest.approx(model.memory.of(plan))
    assert all(curve.times[-1] == detail.makespan for curve in detail.memory)
    assert detail.peaks == list(model.memory.of(plan))
    assert detail.capacity == [2**34] * 4
    assert {sync.stage for sync in detail.syncs} == set(range(len(plan.stages))), "two pipelines sum their gradients"
    assert max(sync.start + sync.duration for sync in detail.syncs) <= detail.makespan * (1 + 1e-9)


def test_a_large_timeline_is_bounded_and_says_what_is_left_out():
    plan = plan_of("1f1b", devices=48, micro_batches=512)
    detail = detail_of(0, plan, model_of(48, 48))
    assert detail.total_devices == 48
    assert detail.total_operations == 48 * (2 * 512 + 1)
    assert (detail.devices[0], detail.devices[-1], len(detail.devices)) == (0, 47, details.DEVICES)
    assert len(set(detail.devices)) == details.DEVICES
    drawn = detail.operations
    assert len(drawn.start) == details.OPERATIONS
    assert set(drawn.device) <= set(detail.devices)
    before, after = detail.gap
    assert all(start <= before or start >= after for start in drawn.start)
    assert not any(before < time < after for curve in detail.memory for time in curve.times)
    assert len(embedded(detail)) < 500_000


def test_texts_lose_the_folders_of_this_machine_and_nothing_else():
    home, temporary = str(Path.home()), tempfile.gettempdir()
    for text, expected in {
        f"{home}/project/run.py:3: error": "…/project/run.py:3: error",
        f"see '{temporary}/a b/c.yaml'": "see '…/a b/c.yaml'",
        "file:///srv/data/x.csv is missing": "…/x.csv is missing",
        "data.files=[/srv/data/x.txt,/srv/y.txt]": "data.files=[…/x.txt,…/y.txt]",
        "--plan=/srv/plan.json": "--plan=…/plan.json",
        "recipes/tiny.yaml, 2/3, samples/s, 1 / 2": "recipes/tiny.yaml, 2/3, samples/s, 1 / 2",
        "https://example.org/a/b": "https://example.org/a/b",
        "./run.py ../shared/data": "./run.py ../shared/data",
    }.items():
        assert without_folders(text, [home, temporary]) == expected


def test_embedded_json_cannot_end_its_script_element():
    hostile = {"name": "</script><script>alert(1)</script>", "other": "<!-- & \u2028 '\""}
    text = embedded(hostile)
    assert not set("<>&\u2028") & set(text)
    assert json.loads(text) == hostile
    assert embedded([float("nan"), float("inf"), 1 / 3]) == "[null,null,0.333333]"
