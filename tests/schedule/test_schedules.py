"""The orders of operations, the text form, the placement of syncs, and the errors."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from auto3d.errors import InputError
from auto3d.schedule import build_schedule
from auto3d.schedule.in_flight import peak_activations
from auto3d.schedule.operation import Kind, Operation, Schedule, parse
from auto3d.schedule.weight_versions import weight_copies
from tests.schedule.samples import BY_RULE, by_hand, schedules


def texts(schedule: Schedule) -> list[str]:
    return [" ".join(map(str, operations)) for operations in schedule.operations]


def test_order_of_one_forward_one_backward():
    assert texts(build_schedule("1f1b", devices=3, micro_batches=4)) == [
        "F0@0 F1@0 F2@0 B0@0 F3@0 B1@0 B2@0 B3@0 S@0 U@0",
        "F0@1 F1@1 B0@1 F2@1 B1@1 F3@1 B2@1 B3@1 S@1 U@1",
        "F0@2 B0@2 F1@2 B1@2 F2@2 B2@2 F3@2 B3@2 S@2 U@2",
    ]


def test_order_of_the_shifted_critical_path():
    """Merak, figure 4c: four stages, five micro-batches."""
    assert texts(build_schedule("shifted-critical-path", devices=4, micro_batches=5))[1:] == [
        "F0@1 F1@1 F2@1 R0@1 B0@1 F3@1 R1@1 B1@1 F4@1 R2@1 B2@1 R3@1 B3@1 R4@1 B4@1 S@1 U@1",
        "F0@2 F1@2 F2@2 R0@2 B0@2 R1@2 B1@2 F3@2 R2@2 B2@2 F4@2 R3@2 B3@2 R4@2 B4@2 S@2 U@2",
        "F0@3 B0@3 F1@3 B1@3 F2@3 B2@3 F3@3 B3@3 F4@3 B4@3 S@3 U@3",
    ]


def test_order_of_v_min():
    """Slots 0, 3, 4 and 7 on the first of two devices and 1, 2, 5 and 6 on the second, every six slots."""
    assert texts(build_schedule("v-min", devices=2, micro_batches=3)) == [
        "F0@0 F0@3 I0@3 W0@3 F1@0 I0@0 W0@0 F1@3 I1@3 W1@3 F2@0 I1@0 W1@0 F2@3 I2@3 W2@3 I2@0 W2@0 S@3 S@0 U@3 U@0",
        "F0@1 F0@2 I0@2 I0@1 F1@1 F1@2 W0@2 W0@1 I1@2 I1@1 F2@1 F2@2 W1@2 W1@1 I2@2 I2@1 W2@2 W2@1 S@2 S@1 U@2 U@1",
    ]


def test_order_of_chimera():
    """Chimera, figures 3 and 4b: four stages, four micro-batches. Stage 3 syncs early; stage 2 has no bubble."""
    assert texts(build_schedule("chimera", devices=4, micro_batches=4, sync="eager-opt")) == [
        "F0@0 F1@0 F2@3:1 B2@3:1 F3@3:1 B3@3:1 S@3:1 B0@0 B1@0 S@0 U@3:1 U@0",
        "F0@1 F2@2:1 F1@1 F3@2:1 B2@2:1 B0@1 B3@2:1 B1@1 S@2:1 S@1 U@2:1 U@1",
        "F2@1:1 F0@2 F3@1:1 F1@2 B0@2 B2@1:1 B1@2 B3@1:1 S@2 S@1:1 U@2 U@1:1",
        "F2@0:1 F3@0:1 F0@3 B0@3 F1@3 B1@3 S@3 B2@0:1 B3@0:1 S@0:1 U@3 U@0:1",
    ]


def test_order_of_looped_bfs():
    assert texts(build_schedule("looped-bfs", devices=2, micro_batches=3, sync="eager")) == [
        "F0@0 F1@0 F2@0 F0@2 F1@2 F2@2 B2@2 B1@2 B0@2 S@2 B2@0 B1@0 B0@0 S@0 U@2 U@0",
        "F0@1 F1@1 F2@1 F0@3 F1@3 F2@3 B2@3 B1@3 B0@3 S@3 B2@1 B1@1 B0@1 S@1 U@3 U@1",
    ]


def test_order_of_interleaved_zero_bubble():
    assert texts(build_schedule("interleaved-zero-bubble", devices=2, micro_batches=2)) == [
        "F0@0 F1@0 F0@2 F1@2 I0@2 W0@2 I1@2 W1@2 I0@0 W0@0 I1@0 W1@0 S@2 S@0 U@2 U@0",
        "F0@1 F1@1 F0@3 I0@3 F1@3 I1@3 W0@3 I0@1 W1@3 I1@1 W0@1 W1@1 S@3 S@1 U@3 U@1",
    ]


def test_order_of_hanayo():
    """Two waves pass devices 0, 1, 1, 0, 0, 1, 1, 0."""
    schedule = build_schedule("hanayo", devices=2, micro_batches=2, waves=2)
    assert [schedule.device_of[stage, 0] for stage in range(8)] == [0, 1, 1, 0, 0, 1, 1, 0]
    assert texts(build_schedule("hanayo", devices=2, micro_batches=2)) == [
        "F0@0 F1@0 F0@3 B0@3 F1@3 B1@3 B0@0 B1@0 S@3 S@0 U@3 U@0",
        "F0@1 F0@2 F1@1 F1@2 B0@2 B0@1 B1@2 B1@1 S@2 S@1 U@2 U@1",
    ]


def test_order_of_seq1f1b():
    """Slices 0 and 1 are those of micro-batch 0, 2 and 3 those of micro-batch 1, and so on."""
    assert texts(build_schedule("seq1f1b", devices=3, micro_batches=3)) == [
        "F0@0 F1@0 F2@0 F3@0 B1@0 F4@0 B0@0 F5@0 B3@0 B2@0 B5@0 B4@0 S@0 U@0",
        "F0@1 F1@1 F2@1 B1@1 F3@1 B0@1 F4@1 B3@1 F5@1 B2@1 B5@1 B4@1 S@1 U@1",
        "F0@2 F1@2 B1@2 F2@2 B0@2 F3@2 B3@2 F4@2 B2@2 F5@2 B5@2 B4@2 S@2 U@2",
    ]
    one = build_schedule("seq1f1b", devices=3, micro_batches=4, slices=1)
    assert replace(one, name="1f1b") == build_schedule("1f1b", devices=3, micro_batches=4)
    sliced = build_schedule("seq1f1b", devices=3, micro_batches=4, slices=3)
    assert (sliced.parts, sliced.slices, sliced.sample_parts) == (3, 3, 1)


def test_placement_of_chimera_on_four_pipes():
    """Chimera, figure 8: the second pipe down of eight stages goes over devices 4, 5, 6, 7, 0, 1, 2, 3."""
    placement = build_schedule("chimera", devices=8, micro_batches=8, pipes=4).device_of
    assert [placement[stage, 2] for stage in range(8)] == [4, 5, 6, 7, 0, 1, 2, 3]
    assert [placement[stage, 3] for stage in range(8)] == [3, 2, 1, 0, 7, 6, 5, 4]


def test_doubling_and_halving_are_one_order():
    for devices in (2, 4, 8):
        for units in (1, 2, 3):
            doubled = build_schedule("chimera", devices=devices, micro_batches=2 * units * devices, scale="doubling")
            halved = build_schedule("chimera", devices=devices, micro_batches=units * devices, scale="halving")
            assert doubled.operations == halved.operations
            assert (doubled.parts, halved.parts) == (1, 2)
    first = texts(build_schedule("chimera", devices=2, micro_batches=4, scale="doubling"))[0]
    assert first == "F0+1@0 F2+3@1:1 B2@1:1 B0@0 B3@1:1 B1@0 S@1:1 S@0 U@1:1 U@0"


def test_later_units_of_doubling_are_doubled_throughout():
    schedule = build_schedule("chimera", devices=8, micro_batches=48, scale="doubling")
    for operations in schedule.operations:
        for operation in operations:
            if operation.kind is Kind.FORWARD and operation.micro_batches[0] >= 16:
                assert len(operation.micro_batches) == 2
            if operation.kind is Kind.BACKWARD:
                assert len(operation.micro_batches) == 1


@pytest.mark.parametrize("name", BY_RULE)
def test_where_syncs_stand(name):
    """Lazy syncs are at the end, eager ones after the last backward of their stage; no other operation moves."""
    for devices in (2, 4, 6):
        lazy, eager, opt = ([] for _ in range(3))
        for sync, placed in (("lazy", lazy), ("eager", eager), ("eager-opt", opt)):
            placed += schedules(name, devices, [1, devices, 3 * devices + 1], (sync,))
        for late, early, some in zip(lazy, eager, opt, strict=True):
            if late.weight_version:
                assert late == early == some
                continue
            for device in range(devices):
                orders = [schedule.operations[device] for schedule in (late, early, some)]
                rest = [[o for o in order if o.kind is not Kind.SYNC] for order in orders]
                assert rest[0] == rest[1] == rest[2]
                kinds = "".join(o.kind for o in orders[0])
                assert kinds.rstrip("U").rstrip("S").count("S") == 0
                for order in orders[1:]:
                    for index, operation in enumerate(order):
                        if operation.kind is Kind.SYNC and any(o.kind not in "SU" for o in order[index:]):
                            last = order[index - 1]
                            assert last.kind in "BW"
                            assert (last.stage, last.pipe) == (operation.stage, operation.pipe)
                in_time = [
                    {
                        o
                        for i, o in enumerate(order)
                        if o.kind is Kind.SYNC and any(p.kind not in "SU" for p in order[i:])
                    }
                    for order in orders
                ]
                assert not in_time[0]
                assert in_time[2] <= in_time[1]


def test_a_single_sync_per_device_is_always_at_the_end():
    """With one stage and one pipe per device, as in 1F1B, every placement is the same."""
    orders = {
        texts(build_schedule("1f1b", devices=4, micro_batches=6, sync=s))[0] for s in ("lazy", "eager", "eager-opt")
    }
    assert len(orders) == 1


@given(stages=st.integers(1, 16), micro_batches=st.integers(1, 64))
def test_activations_in_flight(stages, micro_batches):
    """GPipe holds all micro-batches, 1F1B at most D - s of them on stage s (Chimera, table 2)."""
    gpipe, alternating = (
        build_schedule(name, devices=stages, micro_batches=micro_batches) for name in ("gpipe", "1f1b")
    )
    assert peak_activations(gpipe) == [micro_batches] * stages
    assert peak_activations(alternating) == [min(micro_batches, stages - stage) for stage in range(stages)]


def test_memory_by_hand():
    split = by_hand("F0@0 F1@0 I0@0 B1@0 W0@0 S@0 U@0", "F0+1@1 B0@1 B1@1 S@1 U@1")
    assert peak_activations(split) == [2, 2]
    assert peak_activations(by_hand("F0@0 I0@0 F1@0 I1@0 W0@0 W1@0 S@0 U@0", "")) == [2, 0]
    two_chunks = by_hand("F0@0 F0@1 B0@1 B0@0", stages=2, micro_batches=1, device_of={(0, 0): 0, (1, 0): 0})
    assert peak_activations(two_chunks) == [1]
    assert weight_copies(two_chunks) == [1]
    parts = by_hand("F0+1@0 B0@0 B1@0", stages=1, micro_batches=1, parts=2)
    assert peak_activations(parts) == [1]
    line = "F0@0 F1@0 B0@0 S@0 U@0 F2@0 B1@0 S@0 U@0 B2@0 S@0 U@0"
    versions = {(0, 0): 0, (0, 1): 0, (0, 2): 1}
    assert weight_copies(by_hand(line, stages=1, micro_batches=3, weight_version=versions)) == [2]
    assert weight_copies(by_hand(line, stages=1, micro_batches=3, weight_version=versions | {(0, 2): 0})) == [3 - 1]


@given(
    kind=st.sampled_from([kind for kind in Kind if kind not in (Kind.SYNC, Kind.UPDATE)]),
    stage=st.integers(0, 99),
    micro_batches=st.lists(st.integers(0, 999), min_size=1, max_size=3).map(tuple),
    pipe=st.integers(0, 9),
)
def test_text_form_names_the_operation(kind, stage, micro_batches, pipe):
    operation = Operation(kind, stage, micro_batches, pipe)
    assert parse(str(operation)) == operation
    assert parse(str(Operation(Kind.SYNC, stage, (), pipe))) == Operation(Kind.SYNC, stage, (), pipe)


def test_text_forms_of_the_design():
    assert str(Operation(Kind.FORWARD, 1, (3,))) == "F3@1"
    assert str(Operation(Kind.FORWARD, 2, (0, 1), pipe=1)) == "F0+1@2:1"
    for wrong in ("F@1", "S3@1", "X3@1", "F3", "F3@1:", "F3+@1", ""):
        with pytest.raises(InputError):
            parse(wrong)


@pytest.mark.parametrize(
    ("name", "devices", "micro_batches", "options", "words"),
    [
        ("gpip", 2, 2, {}, "did you mean gpipe"),
        ("1f1b", 0, 2, {}, "0 devices"),
        ("1f1b", 2, 0, {}, "0 micro-batches"),
        ("1f1b", 2, 2, {"pipes": 2}, "option 'pipes' is unknown; its options are recompute, sync"),
        ("1f1b", 2, 2, {"recompute": "half"}, "recompute is 'half'; it must be one of none, full"),
        ("1f1b", 2, 2, {"sync": "early"}, "sync is 'early'; it must be one of lazy, eager, eager-opt"),
        ("pipedream", 2, 2, {"sync": "early"}, "sync is 'early'; it must be one of lazy, eager, eager-opt"),
        ("interleaved-1f1b", 2, 2, {"chunks": 1}, "chunks is 1; it must be 2 or more"),
        ("interleaved-zero-bubble", 2, 2, {"chunks": 1}, "chunks is 1; it must be 2 or more"),
        ("looped-bfs", 2, 2, {"chunks": 0}, "chunks is 0; it must be 2 or more"),
        ("hanayo", 2, 2, {"waves": 0}, "waves is 0; it must be 1 or more"),
        ("interleaved-1f1b", 4, 8, {"fewer": 4}, "fewer is 4; it must be from 0 to 3"),
        ("interleaved-1f1b", 4, 8, {"group": 3}, "group is 3; 8 micro-batches on 4 devices take from 4 to 8, or 0"),
        ("interleaved-1f1b", 4, 8, {"group": 9}, "group is 9; 8 micro-batches on 4 devices take from 4 to 8, or 0"),
        ("interleaved-1f1b", 4, 3, {"group": 4}, "group is 4; 3 micro-batches on 4 devices take 3, or 0 for 3"),
        ("interleaved-zero-bubble", 4, 8, {"group": -1}, "group is -1; 8 micro-batches on 4 devices take from 4 to 8"),
        ("seq1f1b", 2, 2, {"slices": 0}, "slices is 0; it must be 1 or more"),
        ("seq1f1b", 2, 2, {"chunks": 2}, "option 'chunks' is unknown; its options are slices, recompute, sync"),
        ("pipedream", 2, 2, {"iterations": 0}, "iterations is 0; it must be 1 or more"),
        ("pipedream-2bw", 8, 6, {}, "use 7 micro-batches or more"),
        ("gems", 1, 2, {}, "need 2 devices or more"),
        ("shifted-critical-path", 1, 2, {}, "2 devices or more"),
        ("chimera", 5, 4, {}, "5 devices; it needs an even number, 4 or 6"),
        ("chimera", 1, 4, {}, "1 device; it needs an even number, 2 or more"),
        ("chimera", 8, 8, {"pipes": 6}, "6 pipes on 8 devices; .* 2, 4, 8"),
        ("chimera", 8, 8, {"pipes": 3}, "3 pipes on 8 devices; .* 2, 4, 8"),
        ("chimera", 8, 8, {"scale": "both"}, "scale is 'both'; it must be one of direct, doubling, halving"),
    ],
)
def test_impossible_schedules_are_refused(name, devices, micro_batches, options, words):
    with pytest.raises(InputError, match=words) as caught:
        build_schedule(name, devices=devices, micro_batches=micro_batches, **options)
    assert "\n" not in str(caught.value)
