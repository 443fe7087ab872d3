"""Measured memory in tables and in the output of commands, on CPUs and on GPUs."""

import csv
import json
import re
from dataclasses import asdict, replace

import pytest

from auto3d.errors import InputError
from auto3d.plan import Plan
from auto3d.runtime.measurement import BYTES, CommunicationCalls, Measurement, Status
from auto3d.search.axes import plan_name
from launch.console import tables
from launch.console.training import print_training
from launch.recipe.load import load
from tests.distributed.parity import make_plan

MIB = 2**20
ON_CPU = {"peak_bytes": [100 * MIB, 120 * MIB], "predicted_bytes": [90 * MIB, 110 * MIB]}
ON_GPU = {**ON_CPU, "reserved_bytes": [150 * MIB, 170 * MIB], "used_bytes": [650 * MIB, 640 * MIB]}


@pytest.fixture(scope="module")
def plan() -> Plan:
    return make_plan("gpt2", dp=1, pp=2)


def measurement(plan: Plan, memory: dict[str, list[int]]) -> Measurement:
    return Measurement(plan=plan, status=Status.OK, iteration_s=[1.0], loss=[1.0], grad_norm=[1.0], **memory)


def test_a_gpus_table_has_used_beside_allocated_memory_and_a_cpus_has_one_column(folder, plan):
    for memory, device, headings, cells in (
        (ON_CPU, "cpu", ["peak (MiB)", "status"], ["120", "ok"]),
        (ON_GPU, "cuda", ["peak (MiB)", "used (MiB)", "status"], ["120", "650", "ok"]),
    ):
        recipe = load("own.yaml", [f"cluster.device={device}"])
        found = tables.results(recipe, [measurement(plan, memory)], 1, 0)
        tables.write(found)
        heading, _, row = (folder / "tables/own/table.md").read_text().splitlines()[:3]
        shown = [[cell.strip() for cell in line.strip("|").split("|")] for line in (heading, row)]
        assert [line[-len(headings) :] for line in shown] == [headings, cells]
        assert ("used on its device" in tables.caption(found)) == (device == "cuda")
        (record,) = tables.rows(found)
        assert {name: record[name] for name in BYTES} == {name: max(memory.get(name, [None])) for name in BYTES}


def test_choices_of_tensor_parallelism_have_columns_where_they_differ(folder, plan):
    split = make_plan("gpt2", dp=1, pp=1, tp=2)
    others = [replace(split, sequence_parallel=True), replace(split, tensor_overlap="sub-pipelined")]

    def headings(*plans: Plan) -> set[str]:
        found = tables.results(load("own.yaml", []), [measurement(each, ON_CPU) for each in plans], len(plans), 0)
        tables.write(found)
        line = (folder / "tables/own/table.md").read_text().splitlines()[0]
        return {cell.strip() for cell in line.strip("|").split("|")} & {"sequence-parallel", "tensor overlap"}

    assert headings(plan, split) == set()
    assert headings(split, others[0]) == {"sequence-parallel"}
    assert headings(split, *others) == {"sequence-parallel", "tensor overlap"}


@pytest.mark.parametrize(
    ("memory", "words"),
    [
        (ON_CPU, "peak memory 120 MiB per rank (measured; 110 MiB predicted)"),
        (ON_GPU, "peak memory 120 MiB per rank, 650 MiB used on its device (measured; 110 MiB predicted)"),
    ],
)
def test_a_training_ends_with_predicted_beside_measured_memory(plan, capsys, memory, words):
    record = {**asdict(measurement(plan, memory)), "plan_name": plan_name(plan), "samples_per_s": 1.0}
    print_training(record, as_json=False)
    assert words in capsys.readouterr().out


def test_measurements_survive_json_and_older_ones_are_read(plan):
    """Older measurements have only one number for memory."""
    whole = measurement(plan, ON_GPU)
    assert Measurement.from_json(whole.to_json()) == whole
    older = json.loads(whole.to_json())
    for name in ("reserved_bytes", "used_bytes", "predicted_bytes"):
        del older[name]
    read = Measurement.from_json(json.dumps(older))
    assert (read.peak_bytes, read.reserved_bytes, read.used_bytes) == (ON_GPU["peak_bytes"], [], [])


def test_communication_has_columns_where_a_row_has_any_or_says_why_not(folder, plan):
    """A message counts where it is sent, seconds on both sides; each figure is that of the rank that has most."""

    def calls(operation: str, size: float, seconds: float) -> CommunicationCalls:
        return CommunicationCalls(operation=operation, calls=2.0, message_bytes=size, seconds=seconds)

    logged = measurement(plan, ON_CPU)
    sender = [calls("all_reduce", 3 * MIB, 0.25), calls("send", MIB, 0.5)]
    receiver = [calls("all_reduce", 3 * MIB, 0.25), calls("recv", 2 * MIB, 1.0)]
    communication = replace(logged, communication=[sender, receiver])
    assert Measurement.from_json(communication.to_json()) == communication
    for others, rows in (
        ([communication, replace(logged, why_not_logged="no log")], [("4.00", "1.250", "-"), ("-", "-", "no log")]),
        ([logged], []),
    ):
        found = tables.results(load("own.yaml", []), others, len(others), 0)
        tables.write(found)
        heading, _, *lines = (folder / "tables/own/table.md").read_text().splitlines()
        shown = [[cell.strip() for cell in line.strip("|").split("|")] for line in (heading, *lines[: len(others)])]
        headings = ("communicated (MiB)", "communicating (s)", "why not logged")
        assert bool(rows) == all(one in shown[0] for one in headings) == any(one in shown[0] for one in headings)
        places = [shown[0].index(one) for one in headings] if rows else []
        assert [tuple(line[place] for place in places) for line in shown[1:]] == (rows or [()])
        assert ("whose calls block" in tables.caption(found)) == bool(rows)


# Throughput, predictions and the baseline


def csv_rows(folder) -> list[dict[str, str]]:
    with (folder / "tables/own/table.csv").open() as file:
        return list(csv.DictReader(file))


def timed(plan: Plan, seconds: float, **more) -> Measurement:
    return replace(measurement(plan, ON_CPU), iteration_s=[seconds], **more)


def accelerator(folder, peak: str) -> str:
    (folder / "peak.yaml").write_text(f"peak_tflops: {peak}\nmemory_gb_per_s: 1\n")
    return "cluster.accelerator=./peak.yaml"


def test_throughput_is_that_of_the_stored_flops_and_a_row_without_them_has_empty_cells(folder, plan):
    recipe = load("own.yaml", [accelerator(folder, "{float32: 0.004}")])
    whole = replace(plan, dp=1, pp=1, stages=make_plan("gpt2", dp=1, pp=1).stages, placement=((0,),))
    measured = [
        timed(plan, 2.0, tokens_per_sample=10, model_flops=12e9, recomputed_flops=4e9),
        timed(whole, 4.0),  # an older measurement
    ]
    tables.write(tables.results(recipe, measured, 2, 0), latex=True)
    first, second = csv_rows(folder)
    names = ("model_flops_per_s_per_device", "hardware_flops_per_s_per_device", "mfu", "tokens_per_s")
    assert [float(first[name]) for name in names] == pytest.approx([3e9, 4e9, 0.75, 10 * plan.global_batch / 2])
    assert [second[name] for name in names] == [""] * 4
    assert float(second["samples_per_s"]) == plan.global_batch / 4
    tex = (folder / "tables/own/table.tex").read_text()
    assert r"75.0\%" in tex
    assert all(line.startswith("%") for line in tex[: tex.index(r"\begin{tabular}")].splitlines())
    assert {r"\toprule", r"\midrule", r"\bottomrule"} <= set(tex.splitlines())


def test_columns_without_a_figure_are_left_out(folder, plan):
    def columns(recipe, *measurements: Measurement, **more) -> set[str]:
        tables.write(tables.results(recipe, measurements, len(measurements), 0, **more))
        rates = {"model_flops_per_s_per_device", "hardware_flops_per_s_per_device", "mfu"}
        return set(csv_rows(folder)[0]) & (rates | {"predicted_s", "prediction_error", "speed_up", "tokens_per_s"})

    plain, counted = timed(plan, 1.0), timed(plan, 1.0, model_flops=1e9, recomputed_flops=0.0)
    unknown, known = load("own.yaml", []), load("own.yaml", [accelerator(folder, "{float32: 1}")])
    assert columns(unknown, plain) == set()
    assert columns(unknown, counted) == {"model_flops_per_s_per_device"}
    assert columns(known, counted) == {"model_flops_per_s_per_device", "mfu"}
    tf32 = load("own.yaml", ["cluster.accelerator=./peak.yaml", "training.tf32=true"])
    assert columns(tf32, counted) == {"model_flops_per_s_per_device"}, "this accelerator has no peak in TF32"
    emulated = replace(counted, emulated=True)
    assert columns(known, emulated) == {"model_flops_per_s_per_device"}, "emulated devices are not the accelerator"
    predicted = columns(unknown, plain, predicted_s={plan: 1.5}, predicted_on="simulated, on a figure")
    assert predicted == {"predicted_s", "prediction_error"}
    assert float(csv_rows(folder)[0]["prediction_error"]) == 0.5


def test_trials_on_a_machine_without_a_profile_correct_its_predictions(folder, plan):
    """Measured twice, three and six times the prediction: the others' mean ratio, and the table says what it is."""
    plans = [plan, replace(plan, schedule="gpipe"), make_plan("gpt2", dp=1, pp=1)]
    measured = [timed(each, seconds) for each, seconds in zip(plans, (2.0, 3.0, 6.0), strict=True)]
    more = {"predicted_s": dict.fromkeys(plans, 1.0), "predicted_on": "simulated, on a data sheet"}
    recipe = load("own.yaml", [])
    tables.write(tables.results(recipe, measured, 3, 0, **more, profiled=False))
    found = csv_rows(folder)
    assert [float(one["corrected_s"]) for one in found] == pytest.approx([18**0.5, 12**0.5, 6**0.5])
    assert [one["predicted_s"] for one in found] == ["1.0"] * 3
    low, high = json.loads(found[0]["corrected_interval_s"])
    assert low < 18**0.5 < high
    text = (folder / "tables/own/table.md").read_text()
    assert f"{18**0.5:.3f} | {low:.3f} to {high:.3f}" in re.sub(" +", " ", text)
    assert "no profile of this machine" in text
    tables.write(tables.results(recipe, measured, 3, 0, **more))
    assert "corrected_s" not in csv_rows(folder)[0], "a profile needs no correction"


def test_a_baseline_is_exactly_one_row_that_ran(folder, plan):
    others = [replace(plan, schedule="gpipe"), make_plan("gpt2", dp=1, pp=1)]
    measured = [timed(plan, 2.0), timed(others[0], 3.0), timed(others[1], 6.0)]
    failed = Measurement(plan=make_plan("gpt2", dp=2, pp=1), status=Status.OOM)
    recipe = load("own.yaml", [])

    def speed_ups(baseline: str) -> list[float | None]:
        found = tables.results(recipe, [*measured, failed], 4, 0, baseline=baseline)
        return [row["speed_up"] for row in tables.rows(found)]

    assert speed_ups("dp=1 pp=1") == [3.0, 2.0, 1.0, None]
    assert speed_ups("schedule=gpipe") == [1.5, 1.0, 0.5, None]
    assert "partition" not in tables.terminal(tables.results(recipe, measured, 4, 0))
    methods = {one.plan: {"partition": "uniform", "placement": "megatron"} for one in measured}
    methods[others[0]] = {"partition": "autopipe", "placement": "megatron"}
    found = tables.results(recipe, measured, 4, 0, candidates=methods, baseline="partition=autopipe")
    assert [(row["partition"], row["speed_up"]) for row in tables.rows(found)] == [
        ("uniform", 1.5),
        ("autopipe", 1.0),
        ("uniform", 0.5),
    ]
    assert "autopipe" in tables.terminal(found)
    assert "placement" not in tables.terminal(found), "it is the same in all rows"
    for baseline, problem in {
        "pp=2": "2 rows match 'pp=2'; add what one of them has: schedule=1f1b, schedule=gpipe",
        "dp=4": "no row matches 'dp=4'; the rows are: dp=1 pp=2 schedule=1f1b, dp=1 pp=2 schedule=gpipe, dp=1 pp=1 ",
        "dp=2": "the trial of 'dp=2' is oom; name a row that is ok",
        "depth=1": "'depth=1': write KEY=VALUE with a key of engine, dp, tp, pp, micro_batch_size",
        "partition=autopipe": "no row matches",
        "dp": "'dp': write KEY=VALUE",
    }.items():
        with pytest.raises(InputError) as caught:
            speed_ups(baseline)
        assert f"--baseline: {problem}" in str(caught.value)
