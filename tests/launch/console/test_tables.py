"""Measured memory in tables and in the output of commands, on CPUs and on GPUs."""

import json
from dataclasses import asdict, replace

import pytest

from auto3d.plan import Plan
from auto3d.runtime.measurement import BYTES, Measurement, Status
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
    record = {**asdict(measurement(plan, memory)), "samples_per_s": 1.0}
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
