"""The closed forms of the papers, against a brute-force simulation in exact fractions."""

from collections import Counter
from fractions import Fraction
from itertools import pairwise, product

import pytest

from auto3d.schedule import build_schedule
from auto3d.schedule.check import check
from auto3d.schedule.in_flight import peak_activations
from auto3d.schedule.operation import Kind, Schedule
from auto3d.schedule.weight_versions import weight_copies
from tests.schedule.reference import critical_path, idle, idle_inside, makespan, spans
from tests.schedule.samples import sizes
from tests.soak import soak

DEEPEST = soak(12, 16)  # three quarters of the time of these tests
DEPTHS = (1, 2, 3, 4, 5, 7, 8, *DEEPEST)
EVEN = (2, 4, 6, 8, *DEEPEST)


def built(name: str, devices: int, micro_batches: int, **options) -> Schedule:
    return build_schedule(name, devices=devices, micro_batches=micro_batches, **options)


@pytest.mark.parametrize("d", DEPTHS)
def test_gpipe_and_1f1b(d):
    for n in sizes(d):
        for f, b in ((1, 2), (1, 1), (2, 3)):
            for name in ("gpipe", "1f1b"):
                assert idle(built(name, d, n), F=f, B=b) == [(d - 1) * (f + b)] * d
        assert makespan(built("1f1b", d, n, recompute="full"), F=1, R=1, B=2) == 4 * (n + d - 1)
        assert peak_activations(built("gpipe", d, n)) == [n] * d
        assert peak_activations(built("1f1b", d, n)) == [min(n, d - s) for s in range(d)]
        assert weight_copies(built("1f1b", d, n)) == weight_copies(built("gpipe", d, n)) == [1] * d


@pytest.mark.parametrize("d", DEPTHS)
@pytest.mark.parametrize("k", [1, 2, 3, 4, 8])
def test_seq1f1b(d, k):
    """The bubbles of 1F1B divided by the slices, and k - 1 slices more in flight than micro-batches in 1F1B."""
    for n in sizes(d):
        schedule = built("seq1f1b", d, n, slices=k)
        for f, b in ((1, 2), (1, 1), (2, 3), (3, 1)):
            assert idle(schedule, F=f, B=b) == [Fraction((d - 1) * (f + b), k)] * d
        assert peak_activations(schedule) == pytest.approx([min(n, (d - s + k - 1) / k) for s in range(d)])
        assert weight_copies(schedule) == [1] * d


@pytest.mark.parametrize("d", DEPTHS)
@pytest.mark.parametrize("v", [2, 3, 4])
def test_interleaved(d, v):
    for k in (1, 2, 3, 4):
        for f, b in ((1, 2), (1, 1)):
            schedule = built("interleaved-1f1b", d, k * d, chunks=v)
            assert idle(schedule, F=f, B=b) == [Fraction((d - 1) * (f + b), v)] * d
        if k > 1:
            assert peak_activations(schedule)[0] == pytest.approx(d * (1 + (d - 1) / (d * v)))
        assert weight_copies(schedule) == pytest.approx([1] * d)
    for n in sizes(d):  # at most the time of a full last group
        full = -(-n // d) * d
        assert makespan(built("interleaved-1f1b", d, n, chunks=v), F=1, B=2) <= 3 * full + Fraction(3 * (d - 1), v)


@pytest.mark.parametrize("d", DEPTHS)
def test_interleaved_in_groups(d):
    """Every group size that Megatron-LM takes keeps the closed form; a small last group costs time, no more than D."""
    for group in {d, d + 1, 2 * d - 1}:
        for n in {group + d, 2 * group, 2 * group + 1}:
            for v in (2, 3) if d < 8 else (2,):
                options = {"chunks": v, "group": group}
                schedule = built("interleaved-1f1b", d, n, **options)
                split = built("interleaved-zero-bubble", d, n, **options)
                check(schedule)
                check(split)
                if n % group == 0 or n % group >= d:
                    assert idle(schedule, F=1, B=2) == [Fraction(3 * (d - 1), v)] * d
                    for f, i, w in ((1, 1, 1), (2, 3, 1)):
                        assert idle(split, F=f, I=i, W=w) == [Fraction((d - 1) * (f + i - w), v)] * d
                else:
                    full = n - n % group + d
                    assert makespan(schedule, F=1, B=2) <= 3 * full + Fraction(3 * (d - 1), v)
                if n == 2 * group:
                    ahead = (v - 1) * group + 2 * (d - 1) + 1
                    assert peak_activations(schedule)[0] == pytest.approx(ahead / v)
                    assert max(peak_activations(split)) == pytest.approx(((v - 1) * group + d) / v)


@pytest.mark.parametrize("d", DEPTHS[1:-1])
def test_interleaved_with_fewer_stages_on_the_last_devices(d):
    """Stages that take as long as before: never more time than with the stages that are left out."""
    for fewer, v, n in product({1, d // 2, d - 1}, (2, 3), (1, d, 2 * d + 1)):
        schedule = built("interleaved-1f1b", d, n, chunks=v, fewer=fewer)
        check(schedule)
        held = Counter(schedule.device_of.values())
        assert [held[device] for device in range(d)] == [v] * (d - fewer) + [v - 1] * fewer
        stages = d * v - fewer
        assert schedule.stages == stages
        scale = Fraction(stages, d)  # times of a device whose stages take 1 and 2 each
        taken = makespan(schedule, F=scale, B=2 * scale)
        assert 3 * v * n <= taken <= makespan(built("interleaved-1f1b", d, n, chunks=v), F=v, B=2 * v)


@pytest.mark.parametrize("d", DEPTHS)
def test_looped_bfs(d):
    """The bubbles of interleaved 1F1B and the activations of GPipe."""
    for v in (2, 3):
        for n in sizes(d):
            schedule = built("looped-bfs", d, n, chunks=v)
            if n >= d:
                for f, b in ((1, 2), (1, 1), (2, 3)):
                    assert idle(schedule, F=f, B=b) == [Fraction((d - 1) * (f + b), v)] * d
            assert peak_activations(schedule) == pytest.approx([n] * d)
            assert weight_copies(schedule) == pytest.approx([1] * d)


@pytest.mark.parametrize("d", DEPTHS)
@pytest.mark.parametrize("waves", [1, 2, 3])
def test_hanayo(d, waves):
    """The closed form of Chimera at twice the depth; D micro-batches in flight, one copy of the weights."""
    for k in (1, 2, 3):
        schedule = built("hanayo", d, k * d, waves=waves)
        for f, b in ((1, 1), (1, 2), (2, 3)):
            assert idle(schedule, F=f, B=b) == [Fraction((d - 1) * (f + k * (b - f)), waves)] * d
        assert max(peak_activations(schedule)) == d
        assert weight_copies(schedule) == pytest.approx([1] * d)
    one = built("hanayo", d, d, waves=1)
    assert makespan(one, F=2, B=2) == makespan(built("chimera", 2 * d, 2 * d), F=1, B=1) == 6 * d - 2


@pytest.mark.parametrize("d", DEPTHS[1:])
def test_gems(d):
    for n in sizes(d):
        schedule = built("gems", d, n)
        assert idle(schedule, F=1, B=1) == [(n + 1) * (d - 1)] * d
        assert idle(schedule, F=1, B=2) == [(2 * n + 1) * (d - 1)] * d
        assert peak_activations(schedule) == [1] * d
        assert weight_copies(schedule) == [2] * d


@pytest.mark.parametrize("d", DEPTHS)
def test_merak(d):
    """Early recomputation at all N; the shifted critical path only from N = 3 on, where its closed form holds."""
    for n in sizes(d):
        for f, b in ((1, 2), (1, 1), (2, 3), (1, 3)):
            assert idle(built("early-recompute", d, n), F=f, R=f, B=b) == [(d - 1) * (f + b)] * d
        assert makespan(built("early-recompute", d, n), F=1, R=1, B=2) == 4 * n + 3 * (d - 1)
        if d >= 2:
            schedule = built("shifted-critical-path", d, n)
            assert not any(o.kind is Kind.RECOMPUTE for o in schedule.operations[-1])
            through = (3 * d, 3 * d + 3)  # makespan of one and of two micro-batches
            assert makespan(schedule, F=1, R=1, B=2) == (4 * n + 3 * (d - 2) if n >= 3 else through[n - 1])
            ahead = [*(d - s for s in range(d - 2)), 3, 1]
            assert peak_activations(schedule) == [min(n, held) for held in ahead]
            for f, b in ((1, 1), (2, 3)):
                least = min(idle(schedule, F=f, R=f, B=b))
                assert least == (d - 2) * (f + b) or n < 3
        full = makespan(built("1f1b", d, n, recompute="full"), F=1, R=1, B=2)
        assert full == makespan(built("early-recompute", d, n), F=1, R=1, B=2) + d - 1


@pytest.mark.parametrize("d", EVEN)
def test_chimera(d):
    """Table 2, table 3 and figure 6, for every f."""
    for f in [f for f in range(1, d // 2 + 1) if d // 2 % f == 0]:
        schedule = built("chimera", d, d, pipes=2 * f)
        assert makespan(schedule, F=1, B=1) == 2 * d + d // f - 2
        assert idle(schedule, F=1, B=2) == [2 * (d // f - 2)] * d
        assert weight_copies(schedule) == [2 * f] * d
        for k in (1, 2, 3, 4):
            direct = built("chimera", d, k * d, pipes=2 * f)
            assert idle(direct, F=1, B=1) == [d // f - 2] * d
            held = peak_activations(direct)
            assert (min(held), max(held)) == (d - d // (2 * f) + 1, d)
    schedule = built("chimera", d, d)
    assert makespan(schedule, F=1, B=1) == 3 * d - 2
    assert makespan(schedule, F=1, B=2) == 5 * d - 4
    assert critical_path(schedule, F=1, B=2) == (d, 2 * d - 2)
    assert makespan(built("chimera", d, d, recompute="full"), F=1, R=1, B=2) == 7 * d - 6


@pytest.mark.parametrize("d", EVEN)
@pytest.mark.parametrize("k", [1, 2, 3, 4])
def test_chimera_of_many_units(d, k):
    for f, b in ((1, 1), (1, 2), (2, 3), (1, 3)):
        assert idle(built("chimera", d, k * d), F=f, B=b) == [(d - 2) * (f + k * (b - f))] * d
    doubled = built("chimera", d, 2 * k * d, scale="doubling")
    halved = built("chimera", d, k * d, scale="halving")
    for f, b in ((1, 2), (2, 5), (1, 3)):
        expected = Fraction((d - 2) * (f + b), 2) + (k - 1) * (d - 2) * (b - 2 * f)
        assert idle(doubled, F=f, B=b) == [expected] * d
    # A halved unit is a doubled unit in half the time: its forward takes as long as one of a whole micro-batch.
    assert idle(halved, F=1, B=2) == [Fraction(3 * (d - 2), 4)] * d
    held = peak_activations(doubled)
    assert (min(held), max(held)) == (3 * d / 2 + 1, 2 * d)
    assert peak_activations(halved) == [number / 2 for number in held]
    assert d / 2 < min(peak_activations(halved)) <= max(peak_activations(halved)) == d
    recomputing = built("chimera", d, 2 * k * d, scale="doubling", recompute="full")
    assert idle(recomputing, F=1, R=1, B=2) == idle(doubled, F=1, B=3)


@pytest.mark.parametrize("d", EVEN)
def test_chimera_doubled_on_more_pipes(d):
    for f in [f for f in range(1, d // 2 + 1) if d // 2 % f == 0]:
        for k in (1, 2):
            schedule = built("chimera", d, 2 * k * d, pipes=2 * f, scale="doubling")
            assert idle(schedule, F=1, B=2) == [Fraction(3 * (d // f - 2), 2)] * d


@pytest.mark.parametrize("d", EVEN[1:])
def test_direct_loses_to_1f1b_in_the_end_and_doubling_does_not(d):
    for k in (4, 8, 12):
        n = 2 * k * d
        taken = {
            scale: makespan(built("chimera", d, n, scale=scale), F=1, B=2)
            for scale in ("direct", "doubling", "halving")
        }
        assert taken["doubling"] < makespan(built("1f1b", d, n), F=1, B=2) < taken["direct"]
        assert taken["halving"] < taken["doubling"]


@pytest.mark.parametrize("d", EVEN)
def test_chimera_of_any_number(d):
    """N < D, N = 1, N not a multiple of D: at least the time of the work, at most that of a full last unit."""
    for n in range(1, 3 * d):
        schedule = built("chimera", d, n)
        busiest = max(
            sum(len(o.micro_batches) for o in operations if o.kind is Kind.FORWARD)
            for operations in schedule.operations
        )
        assert busiest == n
        full = built("chimera", d, -(-n // d) * d)
        assert 3 * n <= makespan(schedule, F=1, B=2) <= makespan(full, F=1, B=2)
        per_pipe = [
            sum(
                o.kind is Kind.FORWARD and o.stage == 0 and o.pipe == pipe
                for operations in schedule.operations
                for o in operations
            )
            for pipe in (0, 1)
        ]
        assert per_pipe[0] - per_pipe[1] in (0, 1)
    assert makespan(built("chimera", d, 1), F=1, B=2) == 3 * d


@pytest.mark.parametrize("d", DEPTHS)
def test_zero_bubble(d):
    for n in sizes(d):
        h1, h2, v = (built(name, d, n) for name in ("zb-h1", "zb-h2", "zb-v"))
        if n >= d:
            for f, i, w in ((1, 1, 1), (2, 2, 1)):
                assert idle(h1, F=f, I=i, W=w) == [(d - 1) * (f + i - w)] * d
            assert idle(h2, F=1, I=1, W=1) == [d - 1] * d
            assert idle(v, F=1, I=1, W=1) == [Fraction(d - 1, 2)] * d
        if n >= 2 * d - 1:
            assert idle_inside(h2, F=1, I=1, W=1) == [0] * d
            assert idle_inside(v, F=1, I=1, W=1) == [0] * d
        if d > 1:
            assert idle(v, F=1, I=1, W=1)[0] < idle(h1, F=1, I=1, W=1)[0]
        assert max(peak_activations(h1)) == min(n, d)
        assert max(peak_activations(h2)) == min(n, 2 * d - 1)
        assert max(peak_activations(v)) <= min(n, d)
        assert weight_copies(v) == weight_copies(h1) == [1] * d


@pytest.mark.parametrize("d", DEPTHS)
def test_v_half_and_v_min(d):
    """The authors' table: floor((D + 2)/2) and floor((D + 4)/3) micro-batches in flight, idle about 3D/2 and 2D."""
    half, least = (d + 2) // 2, (d + 4) // 3
    for n in sizes(d):
        v_half, v_min = built("v-half", d, n), built("v-min", d, n)
        assert weight_copies(v_half) == weight_copies(v_min) == [1] * d
        if n >= 2 * d:
            assert max(peak_activations(v_half)) == half
            assert max(peak_activations(v_min)) == least
        assert max(peak_activations(v_half)) <= half
        assert max(peak_activations(v_min)) <= least
        if d > 1 and n >= d:
            assert idle(v_half, F=1, I=1, W=1) == [Fraction(3 * (d - 1) + d // 4 - d % 2, 2)] * d
            assert idle(v_min, F=1, I=1, W=1) == [2 * d - (Fraction(3, 2) if d % 3 == 0 else Fraction(5, 2))] * d


@pytest.mark.parametrize("d", [2, 3, 4, 6])
@pytest.mark.parametrize("times", [(4, 3, 2), (3, 4, 3), (2, 2, 1), (4, 5, 2), (1, 2, 1), (2, 1, 1), (5, 2, 2)])
def test_a_repetition_of_v_half_waits_only_at_very_unequal_times(d, times):
    """The authors' condition: no waits while 2I <= W + 2F and 2F <= W + 2I. V-Min waits at all unequal times."""
    f, i, w = times
    grown = {}
    for name in ("v-half", "v-min"):
        fewer, more = (idle(built(name, d, n), F=f, I=i, W=w) for n in (4 * d, 6 * d))
        grown[name] = [b - a for a, b in zip(fewer, more, strict=True)]
    fits = 2 * i <= w + 2 * f and 2 * f <= w + 2 * i
    assert fits == (grown["v-half"] == [0] * d)
    assert min(grown["v-min"]) > 0


@pytest.mark.parametrize("d", DEPTHS)
def test_dualpipe_v(d):
    for n in sizes(d):
        schedule = built("dualpipe-v", d, n)
        if n >= 2 * d:
            assert idle(schedule, F=1, B=2, I=1, W=1) == [Fraction(d - 1, 2)] * d
            assert peak_activations(schedule) == [d + 0.5] * d
        assert max(peak_activations(schedule)) <= d + 0.5
        assert weight_copies(schedule) == [1] * d


@pytest.mark.parametrize("d", DEPTHS)
def test_pipedream(d):
    """The weight versions, and no bubbles between the first fill and the last drain."""
    n = max(1, d)
    for iterations in (3, 6):
        total = n * iterations
        schedule = built("pipedream", d, n, iterations=iterations)
        double = built("pipedream-2bw", d, n, iterations=iterations)
        assert weight_copies(schedule) == [min(d - s, total) for s in range(d)]
        assert weight_copies(double) == [2] * d
        for s in range(d):
            for m in range(total):
                assert schedule.weight_version[s, m] == max(0, m - (d - s - 1))
                assert double.weight_version[s, m] == max(0, m // n - 1)
        for each in (schedule, double):
            assert peak_activations(each) == [min(total, d - s) for s in range(d)]
            assert idle(each, F=1, B=2) == [3 * (d - 1)] * d
            last = spans(each, F=1, B=2)[-1]
            assert all(end == start for (_, end), (start, _) in pairwise(last))
    for s in range(d):
        updates = 0
        for operation in schedule.operations[s]:
            updates += operation.kind is Kind.UPDATE
            if operation.kind is Kind.FORWARD:
                assert schedule.weight_version[s, operation.micro_batches[0]] == updates


@pytest.mark.parametrize("d", [3, 4, 8])
def test_2bw_needs_no_more_than_d_less_one(d):
    assert max(weight_copies(built("pipedream-2bw", d, d - 1))) == 2
