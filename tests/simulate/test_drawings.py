"""Drawings show the operations of the timeline, and other programs can read the files written for them."""

import csv
import json
import re
from itertools import pairwise
from types import SimpleNamespace
from xml.etree import ElementTree

import pytest
from torch.distributed.pipelining.schedules import _add_send_recv, _PipelineScheduleRuntime, _simulate_comms_compute

from auto3d.errors import InputError
from auto3d.schedule import build_schedule
from auto3d.schedule.operation import Kind, Operation, Schedule
from auto3d.simulate.cells import micro_batch_label
from auto3d.simulate.costs import uniform
from auto3d.simulate.draw_svg import draw_svg
from auto3d.simulate.draw_terminal import draw_terminal
from auto3d.simulate.pipelining_csv import pipelining_csv
from auto3d.simulate.simulate import Timeline, simulate
from auto3d.simulate.trace import trace
from tests.each import for_each
from tests.schedule.samples import BY_RULE

SVG = "{http://www.w3.org/2000/svg}"


def timeline_of(name: str, *, devices: int = 4, micro_batches: int = 8, times=None, **options) -> Timeline:
    schedule = build_schedule(name, devices=devices, micro_batches=micro_batches, **options)
    return simulate(schedule, uniform(schedule, **(times or {})))


def computing(schedule: Schedule) -> list[Operation]:
    return [o for operations in schedule.operations for o in operations if o.kind not in (Kind.SYNC, Kind.UPDATE)]


# SVG


@pytest.mark.parametrize("name", BY_RULE)
@for_each("times", [{}, {"sync": 2, "p2p": 0.25, "update": 1}, {"forward": 0}])
def test_svg_has_one_cell_per_operation_and_one_line_per_sync(name, times):
    timeline = timeline_of(name, times=times)
    root = ElementTree.fromstring(draw_svg(timeline))
    groups = root.findall(f"{SVG}g")
    cells = [group for group in groups if "cell" in group.get("class").split()]
    drawn = [cell.find(f"{SVG}title").text.split()[0] for cell in cells]
    operations = [*computing(timeline.schedule)]
    if times.get("update"):
        operations += [o for own in timeline.schedule.operations for o in own if o.kind is Kind.UPDATE]
    assert sorted(drawn) == sorted(map(str, operations))
    lines = [group for group in groups if group.get("class") == "sync"]
    assert len(lines) == (sum(len(sync.started) for sync in timeline.syncs) if times.get("sync") else 0)


def test_svg_cells_are_where_and_as_long_as_their_operations():
    timeline = timeline_of("chimera", micro_batches=4)
    root = ElementTree.fromstring(draw_svg(timeline))
    boxes = {}
    for group in root.findall(f"{SVG}g"):
        box = group.find(f"{SVG}rect")
        boxes[group.find(f"{SVG}title").text.split()[0]] = [float(box.get(key)) for key in ("x", "y", "width")]
    left, _, unit = boxes["F0@0"]
    rows = sorted({y for _, y, _ in boxes.values()})
    assert len(rows) == 4
    for number, operation in enumerate(timeline.operations):
        if operation.micro_batches:
            x, y, width = boxes[str(operation)]
            assert x == pytest.approx(left + timeline.start[number] * unit, abs=0.02)
            assert width == pytest.approx((timeline.end[number] - timeline.start[number]) * unit, abs=0.02)
            assert rows.index(y) == timeline.device_of(operation)


def test_svg_hatches_recomputation():
    def hatched(name: str, **options) -> int:
        root = ElementTree.fromstring(draw_svg(timeline_of(name, **options)))
        return len(root.findall(f"{SVG}g/{SVG}rect[@fill='url(#hatch)']"))

    assert hatched("1f1b") == 0
    assert hatched("1f1b", recompute="full") == 4 * 8
    assert hatched("shifted-critical-path") == 3 * 8


def test_labels():
    whole = build_schedule("chimera", devices=4, micro_batches=8, scale="doubling")
    assert micro_batch_label(whole, Operation(Kind.FORWARD, 0, (2, 3))) == "2+3"
    halves = build_schedule("chimera", devices=4, micro_batches=8, scale="halving")
    assert micro_batch_label(halves, Operation(Kind.FORWARD, 0, (2, 3))) == "1"
    assert micro_batch_label(halves, Operation(Kind.BACKWARD, 0, (3,))) == "1b"
    slices = build_schedule("seq1f1b", devices=2, micro_batches=3, slices=60)
    named = {0: "a", 1: "b", 25: "z", 26: "aa", 27: "ab", 51: "az", 52: "ba", 59: "bh"}
    for number, letters in named.items():
        assert micro_batch_label(slices, Operation(Kind.FORWARD, 0, (60 + number,))) == f"1{letters}"


# Terminal


def test_terminal_without_colour():
    text = draw_terminal(timeline_of("chimera", micro_batches=4, times={"sync": 2}), width=80, colour=False)
    assert text.plain.splitlines()[:4] == [
        "P0  01·22 33 ·0 ··1 ~~~~",
        "    FF FBBFBB BB  BB",
        "P1  ·0213·2 0 3 1 ~~~~··",
        "     FFFF BBBBBBBB",
    ]
    assert not text.spans


def test_terminal_shows_slices_where_their_letters_fit():
    text = draw_terminal(timeline_of("seq1f1b", devices=2, micro_batches=2), width=80, colour=False)
    assert text.plain.splitlines()[:4] == [
        "P0  001··0b10a·1b1a",
        "    FFF  BBFBB BBBB",
        "P1  ·000b10a11b1a··",
        "     FFBBFBBFBBBB",
    ]


@pytest.mark.parametrize("name", BY_RULE)
@for_each("width", [24, 80, 200])
def test_terminal_rows_fit(name, width):
    for times in ({}, {"p2p": 0.013, "sync": 1}, {"forward": 0}):
        timeline = timeline_of(name, micro_batches=12, times=times)
        lines = draw_terminal(timeline, width=width, colour=True).plain.splitlines()
        rows = [line for line in lines if re.match(r"P\d ", line)]
        assert len(rows) == 4
        assert max(map(len, rows)) <= width


def test_terminal_has_a_character_per_unit_where_that_fits():
    (first, *_) = draw_terminal(timeline_of("1f1b"), width=80, colour=True).plain.splitlines()
    assert first == "P0  0123······0 41 52 63 74 ·5 ·6 ·7 "
    (first, *_) = draw_terminal(timeline_of("1f1b", recompute="full"), width=80, colour=True).plain.splitlines()
    assert first == "P0  0123·········/0 4/1 5/2 6/3 7/4 ·/5 ·/6 ·/7 "


# Trace


@pytest.mark.parametrize("name", BY_RULE)
@for_each("overlap", [True, False])
def test_trace(name, overlap):
    timeline = timeline_of(name, times={"p2p": 0.5, "sync": 1, "overlap": overlap})
    events = json.loads(json.dumps(trace(timeline, seconds_per_unit=1e-3)))["traceEvents"]
    compute = [event for event in events if event["ph"] == "X" and event["tid"] == 0]
    assert [event["name"] for event in compute] == [str(operation) for operation in timeline.operations]
    assert [event["ts"] for event in compute] == pytest.approx([1e3 * time for time in timeline.start])
    tracks: dict[tuple[int, int], list[tuple[float, float]]] = {}
    for event in (event for event in events if event["ph"] == "X"):
        tracks.setdefault((event["pid"], event["tid"]), []).append((event["ts"], event["ts"] + event["dur"]))
    for slices in tracks.values():  # Perfetto does not show slices that overlap on one track
        slices.sort()
        assert all(one[1] <= other[0] + 1e-6 for one, other in pairwise(slices))
        assert slices[-1][1] <= 1e3 * timeline.makespan + 1e-6
    named = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"}
    assert named.keys() == tracks.keys()
    assert {name.split()[0] for name in named.values()} == {"compute", "send", "sync"}


# CSV of torch.distributed.pipelining


def load_in_torch(file, schedule: Schedule) -> _PipelineScheduleRuntime:
    """The runtime of torch for one rank, with a stage that has nothing but its position."""
    stage = SimpleNamespace(
        num_stages=schedule.stages, group_size=schedule.devices, group_rank=0, stage_index=0, has_backward=True
    )
    runtime = _PipelineScheduleRuntime([stage], schedule.micro_batches)
    runtime._load_csv(str(file), format="compute_only")
    return runtime


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("gpipe", {}),
        ("1f1b", {}),
        ("interleaved-1f1b", {"chunks": 3}),
        ("zb-h1", {}),
        ("zb-h2", {}),
        ("zb-v", {}),
        ("v-half", {}),
        ("dualpipe-v", {}),
    ],
)
@pytest.mark.parametrize("micro_batches", [3, 8])
def test_csv_loads_in_torch(tmp_path, name, options, micro_batches):
    schedule = build_schedule(name, devices=4, micro_batches=micro_batches, **options)
    file = tmp_path / "schedule.csv"
    file.write_text(pipelining_csv(schedule))
    runtime = load_in_torch(file, schedule)
    assert runtime.stage_index_to_group_rank == {stage: device for (stage, _), device in schedule.device_of.items()}
    for device, own in enumerate(schedule.operations):
        actions = [
            (a.stage_index, a.computation_type.value, a.microbatch_index) for a in runtime.pipeline_order[device]
        ]
        kept = [o for o in own if o.kind not in (Kind.SYNC, Kind.UPDATE)]
        assert actions == [(o.stage, str(o.kind), o.micro_batches[0]) for o in kept]
    home = runtime.stage_index_to_group_rank.__getitem__
    with_messages = _add_send_recv(dict(runtime.pipeline_order), home, schedule.stages)
    _simulate_comms_compute(with_messages, home, schedule.stages)  # raises if a send never meets its receive
    with file.open(newline="") as lines:
        assert len(list(csv.reader(lines))) == 4


@pytest.mark.parametrize(
    ("name", "options", "words"),
    [
        ("chimera", {}, "2 pipes"),
        ("gems", {}, "2 pipes"),
        ("1f1b", {"recompute": "full"}, "recomputation"),
        ("early-recompute", {}, "recomputation"),
        ("pipedream", {}, "iterations that overlap"),
    ],
)
def test_csv_refuses_schedules_that_it_cannot_express(name, options, words):
    with pytest.raises(InputError, match=f"CSV of torch.distributed.pipelining cannot express .*{words}"):
        pipelining_csv(build_schedule(name, devices=4, micro_batches=4, **options))


def test_csv_refuses_doubled_forwards():
    doubled = Schedule(
        name="doubled",
        stages=1,
        micro_batches=2,
        device_of={(0, 0): 0},
        operations=((Operation(Kind.FORWARD, 0, (0, 1)),),),
    )
    with pytest.raises(InputError, match="operations on other than one whole micro-batch"):
        pipelining_csv(doubled)


# Tensor parallelism


@pytest.mark.parametrize("recompute", ["none", "full"])
def test_exposed_collectives_are_the_ends_of_their_operations(recompute):
    """Of 2 forwards and 2 backwards on 2 devices, each ends with half a unit of collectives."""
    timeline = timeline_of("1f1b", devices=2, micro_batches=2, times={"collectives": 0.5}, recompute=recompute)
    longer = timeline_of("1f1b", devices=2, micro_batches=2, recompute=recompute)
    passes = 4 if recompute == "none" else 5  # one backward of each micro-batch also recomputes
    assert timeline.makespan > longer.makespan + 0.5 * (passes - 1)

    root = ElementTree.fromstring(draw_svg(timeline, tp=2))
    assert "2 devices of tp = 2 ranks" in root.find(f"{SVG}text").text
    grey = [box for box in root.iter(f"{SVG}rect") if box.get("fill") == "#7a7a7a"]
    assert len(grey) == 8 + 1, "one in each operation, one in the legend"
    assert "exposed collectives" in [text.text for text in root.iter(f"{SVG}text")]
    assert not any(box.get("fill") == "#7a7a7a" for box in ElementTree.fromstring(draw_svg(longer)).iter(f"{SVG}rect"))

    text = draw_terminal(timeline, width=120, colour=False).plain
    assert sum(line.count("=") for line in text.splitlines() if line.startswith("P")) == 8
    assert "= exposed tensor-parallel collectives" in text

    events = trace(timeline, tp=2)["traceEvents"]
    names = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    assert names == {2 * d + s: f"device {d}, shard {s} of 2" for d in (0, 1) for s in (0, 1)}
    shown = [e for e in events if e.get("cat") == "collectives"]
    assert len(shown) == 16
    ends = {(e["pid"], e["name"]): e["ts"] + e["dur"] for e in events if e.get("cat") == "compute"}
    for event in shown:
        assert event["dur"] == pytest.approx(0.5e6)
        whole = ends[event["pid"], event["name"].removeprefix("collectives of ")]
        assert event["ts"] + event["dur"] == pytest.approx(whole)
