"""A real profile of small models on two ranks, and what the cost model makes of a profile."""

from dataclasses import replace
from functools import cache
from itertools import combinations, pairwise
from json import dumps
from json import loads as from_json

import numpy as np
import pytest

from auto3d.cluster import Accelerator, Cluster, CollectiveTimes, Node, NodeCollectives, place_ranks
from auto3d.cost.model import CostModel
from auto3d.cost.profile import (
    MOST_LOST,
    CandidateTimes,
    MessageTimes,
    ModelTimes,
    Profile,
    ProfileError,
    Setting,
    SubgraphTimes,
    SumTimes,
)
from auto3d.cost.training_options import TrainingOptions
from auto3d.cost.work import exchanges_of, work_of, work_of_local
from auto3d.derived.local_graph import local_graphs
from auto3d.derived.shards import tensor_parallel
from auto3d.partition.cost import analytic
from auto3d.partition.merak import shard
from auto3d.partition.methods.rannc.blocks import form_blocks
from auto3d.partition.methods.rannc.candidates import candidate_stages
from auto3d.partition.methods.rannc.operation_profile import OperationProfiles
from auto3d.plan import Plan, stages_between
from auto3d.runtime.measurement import Status
from auto3d.runtime.profile import link_timing, profiler, subgraph_timing, sum_timing
from auto3d.runtime.profile.distinct_subgraphs import distinct_stages, distinct_subgraphs
from auto3d.runtime.profile.profiler import MachineTimes, NamedStages, measure, measure_stages
from auto3d.runtime.settings import OptimizerSettings, TrainingSettings
from auto3d.share import WHOLE, Share
from launch.run.ranks import run_ranks
from tests.models import MODELS, captured
from tests.partition.test_rannc_blocks import units_of
from tests.soak import soak

ADAMW = OptimizerSettings(
    optimizer="adamw",
    learning_rate=1e-3,
    weight_decay=0.0,
    momentum=0.0,
    betas=(0.9, 0.999),
    learning_rate_schedule="constant",
    warmup_iterations=0,
    clip_norm=1.0,
)
SETTINGS = TrainingSettings(iterations=1, optimizer=ADAMW, device="cpu", threads_per_rank=1, timeout_s=60)
SETTING = Setting(device="cpu", accelerator="device", devices_per_node=2, threads=1)


def shorten(monkeypatch: pytest.MonkeyPatch) -> None:
    """Profile with as few repetitions as possible."""
    monkeypatch.setattr(profiler, "ROUNDS", 2)
    monkeypatch.setattr(profiler, "LOAD_S", 0.0)
    monkeypatch.setattr(subgraph_timing, "ROUND_S", 0.0)
    monkeypatch.setattr(link_timing, "ALL_REDUCE_SIZES", (16, 4096))
    monkeypatch.setattr(link_timing, "SHARED_SIZES", (4096,))
    monkeypatch.setattr(link_timing, "MESSAGE_SIZES", (1024, 65536))
    monkeypatch.setattr(sum_timing, "SUM_SIZES", (4096, 65536))
    monkeypatch.setattr(sum_timing, "REPETITIONS", 2)


@pytest.fixture
def short(monkeypatch):
    shorten(monkeypatch)


def measured(models, data) -> MachineTimes:
    outcome = run_ranks(2, lambda world, report: measure(models, SETTINGS, data, world, seed=1), limit_s=120)
    assert outcome.status is Status.OK, outcome.error
    return outcome.result


@cache
def profile_of(name: str, *ways: bool) -> MachineTimes:
    """The times of a model's subgraphs, and of those of a rank of two, without or with sequence parallelism."""
    model = captured(name, 4)
    bounds = shard(model.graph).bounds
    split = (tensor_parallel(model, Share(tp=2, sequence_parallel=way)) for way in ways)
    subgraphs = [distinct_subgraphs(model, bounds, derived=each) for each in (None, *split)]
    with pytest.MonkeyPatch.context() as monkeypatch:
        shorten(monkeypatch)
        return measured(subgraphs, MODELS[name][1])


@pytest.mark.parametrize(
    ("name", "ways"), [("gpt2", (True,)), *soak(*((name, ()) for name in ("averaging", "t5", "swin")))]
)
def test_a_real_profile(name, ways):
    """Each distinct subgraph is measured once, and keeps as many bytes for its backward as the Graph predicts."""
    model = captured(name, 4)
    bounds = shard(model.graph).bounds
    found = profile_of(name, *ways)
    size = found.sizes[0]

    operators = [[node.operator for node in model.graph.nodes[first:last]] for first, last in pairwise(bounds)]
    assert len(size.kinds) == len(bounds) - 1
    assert set(size.kinds) == set(range(len(size.subgraphs)))
    for one, other in combinations(range(len(operators)), 2):
        assert size.kinds[one] != size.kinds[other] or operators[one] == operators[other]
    if (
        name == "gpt2"
    ):  # token embedding; positions and attention; perceptron and attention in turn; norm; head and loss
        assert size.kinds == (0, 1, 2, 3, 2, 3, 2, 3, 2, 4, 5)

    assert all(one.repetitions >= 2 * subgraph_timing.MIN_REPETITIONS for one in size.subgraphs)
    assert np.all(size.seconds > 0)
    saved = [size.subgraphs[kind].saved_bytes for kind in size.kinds]
    work = work_of(model.graph, bounds)
    # Masks and similar values are computed in each subgraph that uses them, and saved in each.
    assert sum(saved) == pytest.approx(work.saved.sum(), rel=0.1)
    if name != "t5":
        assert saved == [pytest.approx(work.saved[a:b].sum(), rel=0.01, abs=256) for a, b in pairwise(bounds)]

    assert len(found.slowdown) == 2
    assert found.slowdown[0] == 1
    assert min(*found.messages.seconds, *found.messages.processor_s, found.update_s) > 0
    for times in (found.collectives.all_reduce, found.collectives.all_gather, found.collectives.reduce_scatter):
        assert min(times.seconds[0]) > 0
    assert found.messages.link.bandwidth > 0
    assert found.sums.sizes == (4096, 65536)
    assert min(found.sums.seconds) > 0
    assert min(found.sums.lost_s) >= 0


@pytest.mark.parametrize("sequence_parallel", [True, *soak(False)])
def test_a_real_profile_of_a_tensor_parallel_rank(sequence_parallel):
    """It has the subgraphs of the whole model, with the bytes that a rank keeps, and collectives of all sizes."""
    model = captured("gpt2", 4)
    bounds = shard(model.graph).bounds
    tensor = tensor_parallel(model, Share(tp=2, sequence_parallel=sequence_parallel))
    found = profile_of("gpt2", sequence_parallel)
    one, two = found.sizes
    assert (one.tp, two.tp, two.sequence_parallel) == (1, 2, sequence_parallel)
    assert len(two.kinds) == len(one.kinds)
    assert sequence_parallel or two.kinds == one.kinds
    assert np.all(two.seconds > 0)
    (local,) = local_graphs(tensor)
    work = work_of_local(work_of(model.graph, bounds), local)
    saved = [two.subgraphs[kind].saved_bytes for kind in two.kinds]
    assert saved == [pytest.approx(work.saved[a:b].sum(), rel=0.02, abs=1024) for a, b in pairwise(bounds)]
    for exchange in exchanges_of(local, 1.0):
        assert exchange.size in getattr(found.collectives, exchange.collective.name.lower()).sizes


def test_whole_stages_are_run_once_if_they_are_distinct(short):
    """Every run of six blocks is named; runs with equal operators, which GPT-2's layers have, are measured once."""
    model = captured("gpt2", 4)
    costs = analytic(model.graph)
    known = OperationProfiles(lambda size: model.graph, lambda size: costs, smallest=4, largest=4)
    blocks = form_blocks(units_of(model.graph), 6)
    names, stages = zip(*candidate_stages(known, blocks, model.graph), strict=True)
    merged = distinct_stages(model, stages)

    def run(world, report):
        return measure_stages([NamedStages(names=names, model=merged)], SETTINGS, MODELS["gpt2"][1], world, seed=1)

    outcome = run_ranks(1, run, limit_s=120)
    assert outcome.status is Status.OK, outcome.error
    (found,) = outcome.result
    assert list(found.kinds) == list(names)
    assert len(names) == 21 > len(found.forward_s) == max(found.kinds.values()) + 1
    operator = {node.name: node.operator for node in model.graph.nodes}
    of_kind: dict[int, set] = {}
    for name, stage in zip(names, stages, strict=True):
        of_kind.setdefault(found.kinds[name], set()).add(tuple(operator[node] for node in stage.nodes))
    assert all(len(each) == 1 for each in of_kind.values())
    assert min(*found.forward_s, *found.backward_s) > 0
    assert set(found.repetitions) == {profiler.STAGE_ROUNDS * subgraph_timing.MIN_REPETITIONS}


@pytest.mark.soak
def test_subgraphs_take_about_as_long_as_a_whole_stage(short):
    """Both sides are measured times, which only an idle machine gives; hence in soak, and a loose bound."""
    model = captured("gpt2", 4)
    bounds = shard(model.graph).bounds
    separate = distinct_subgraphs(model, bounds)
    whole = distinct_subgraphs(model, (0, len(model.graph.nodes)))
    sums = [size.seconds.sum(axis=1)[:2] for size in measured([separate, whole], MODELS["gpt2"][1]).sizes]
    assert np.all(sums[0] < 4 * sums[1])
    assert np.all(sums[1] < 4 * sums[0])


def made_up(sizes=(2, 4)) -> Profile:
    """A profile of GPT-2 in which forward times grow by a second per kind of subgraph, and with the samples."""
    models = []
    for samples in sizes:
        model = captured("gpt2", samples)
        kinds = distinct_subgraphs(model, shard(model.graph).bounds).kinds
        times = [
            SubgraphTimes(
                name=str(kind),
                forward_s=(1.0 + kind) * samples,
                backward_s=3.0 * samples,
                backward_weight_s=1.0 * samples,
                saved_bytes=0,
                repetitions=1,
            )
            for kind in range(max(kinds) + 1)
        ]
        fingerprint = model.graph.fingerprint
        models.append(ModelTimes(micro_batch_size=samples, graph=fingerprint, kinds=kinds, subgraphs=tuple(times)))
    return Profile(
        setting=SETTING,
        host="here",
        torch="2",
        model="GPT2LMHeadModel of tiny",
        made="2026-01-01",
        sizes=tuple(models),
        slowdown=(1.0, 1.5),
        messages=MessageTimes(sizes=(1000, 2000, 4000), seconds=(2e-3, 3e-3, 5e-3), processor_s=(1e-3, 1e-3, 1e-3)),
        collectives=NodeCollectives(
            all_reduce=CollectiveTimes(ranks=(2,), sizes=(16, 1000), seconds=((1e-3, 2e-3),)),
            all_gather=CollectiveTimes(ranks=(2,), sizes=(16, 1000), seconds=((1e-3, 3e-3),)),
            reduce_scatter=CollectiveTimes(ranks=(2,), sizes=(16, 1000), seconds=((1e-3, 4e-3),)),
        ),
        update_s=1e-9,
    )


def test_json_and_back():
    profile = made_up()
    assert Profile.from_json(profile.to_json()) == profile
    profile = replace(profile, sums=SumTimes(sizes=(1, 2), seconds=(1.0, 2.0), lost_s=(0.0, 0.5)))
    assert Profile.from_json(profile.to_json()) == profile


@pytest.mark.parametrize(("start", "slowdown"), [(0.0, 0.0), (0.002, 0.0), (0.0, 0.5), (0.003, 1.0)])
def test_the_cost_of_sums_beside_compute_is_read_off_delays(start, slowdown):
    seconds = (0.001, 0.004, 0.1)
    lost = tuple(start + time * slowdown / (1 + slowdown) for time in seconds)
    sums = SumTimes(sizes=(1, 2, 3), seconds=seconds, lost_s=lost)
    assert sums.start_and_slowdown == pytest.approx((start, slowdown), rel=1e-4, abs=1e-5)
    nodes = (Node(devices=2, accelerator=Accelerator(sync_start_s=7.0, sync_slowdown=8.0)),)
    cluster = Cluster(nodes=nodes, device="cpu")
    (node,) = replace(made_up(), sums=sums).measured(cluster).nodes
    assert (node.accelerator.sync_start_s, node.accelerator.sync_slowdown) == sums.start_and_slowdown
    (node,) = made_up().measured(cluster).nodes
    assert (node.accelerator.sync_start_s, node.accelerator.sync_slowdown) == (7.0, 8.0), "those of the recipe"


def test_one_disturbed_delay_counts_little():
    seconds, lost = (0.001, 0.004, 0.01, 0.02, 0.1), (0.0005, 0.002, 0.0, 0.01, 0.05)
    start, slowdown = SumTimes(sizes=(1, 2, 3, 4, 5), seconds=seconds, lost_s=lost).start_and_slowdown
    assert start < 1e-4
    assert slowdown == pytest.approx(1.0, abs=0.15)


def test_delays_longer_than_the_sums_leave_a_finite_slowdown():
    sums = SumTimes(sizes=(1, 2), seconds=(0.1, 0.2), lost_s=(0.11, 0.22))
    start, slowdown = sums.start_and_slowdown
    assert slowdown == pytest.approx(MOST_LOST / (1 - MOST_LOST), rel=1e-3)
    assert 0 < start < 0.04


def test_times_of_candidate_stages_are_linear_between_sizes():
    sizes = [
        CandidateTimes(micro_batch_size=size, kinds=kinds, forward_s=forward, backward_s=backward, repetitions=(3, 3))
        for size, kinds, forward, backward in (
            (4, {"a": 1, "b": 0, "c": 0}, (5.0, 8.0), (7.0, 9.0)),
            (2, {"a": 0, "b": 1}, (2.0, 3.0), (4.0, 5.0)),
        )
    ]
    profile = replace(made_up(), candidates=tuple(sizes))
    assert profile.stage_seconds("a", 2) == (2.0, 4.0)
    assert profile.stage_seconds("a", 3) == (5.0, 6.5)
    assert profile.stage_seconds("b", 8) == (9.0, 11.0)
    assert profile.stage_seconds("c", 2) == (2.5, 3.5), "one size: in proportion"
    assert profile.stage_seconds("d", 2) is made_up().stage_seconds("a", 2) is None
    assert Profile.from_json(profile.to_json()) == profile
    old = from_json(made_up().to_json())
    del old["candidates"]
    assert Profile.from_json(dumps(old)) == made_up(), "a profile without them is read"


def test_the_cost_model_reproduces_a_profile():
    """Sums of subgraphs are as measured, sizes are interpolated, and tensor degrees scale by the estimate."""
    profile, graphs = made_up(), {samples: captured("gpt2", samples).graph for samples in (2, 3, 4, 8)}

    def cuts(samples):
        return shard(graphs[samples]).bounds

    def work(samples, share):
        whole = work_of(graphs[samples], cuts(samples))
        if share == WHOLE:
            return whole
        return work_of_local(whole, local_graphs(tensor_parallel(captured("gpt2", samples), Share(tp=share.tp)))[0])

    times_at = profile.times_at(work, cuts)
    for samples in graphs:
        times = times_at(samples, Accelerator(), WHOLE)
        wanted = np.array([(1.0 + kind) * samples for kind in profile.sizes[0].kinds])
        assert np.diff(times.forward[list(cuts(samples))]) == pytest.approx(wanted)
        assert times.backward[-1] == pytest.approx(3.0 * samples * len(wanted))
        assert times.backward_weight[-1] == pytest.approx(samples * len(wanted))
        assert np.all(np.diff(times.forward) >= 0)
        assert not times.forward_launch.any()
    whole, halves = (times_at(4, Accelerator(), Share(tp=tp)).forward[-1] for tp in (1, 2))
    assert 0.5 < halves / whole < 1

    link = profile.messages.link
    assert (link.latency_s, link.bandwidth) == (pytest.approx(1e-3), pytest.approx(1e6))
    assert profile.messages.handling == (pytest.approx(1e-3), pytest.approx(0, abs=1e-12))
    assert [profile.collectives.all_reduce.interpolate(2, size) for size in (16, 508, 1000, 3000)] == pytest.approx(
        [1e-3, 1.5e-3, 2e-3, 6e-3]
    )

    # Two ranks with one stage each share processors and compute all the time, so each is 1.5 times slower.
    model = CostModel(
        profile.measured(Cluster(nodes=(Node(devices=2),), device="cpu")), TrainingOptions(), work, times_at=times_at
    )
    plan = Plan(
        graph=graphs[4].fingerprint,
        dp=2,
        tp=1,
        pp=1,
        global_batch=16,
        micro_batch_size=4,
        schedule="gpipe",
        stages=stages_between((0, len(graphs[4].nodes))),
        placement=place_ranks(dp=2, pp=1),
        seed=1,
    )
    parameters = sum(np.prod(value.shape) for value in graphs[4].parameters.values())
    compute = 2 * (whole + 12.0 * len(wanted)) + parameters * 1e-9
    all_reduce = profile.collectives.all_reduce
    reduced = all_reduce.interpolate(2, 4 * parameters) + all_reduce.interpolate(2, 16)
    assert model.seconds(plan) == pytest.approx(1.5 * compute + reduced)


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_the_cost_model_reproduces_a_tensor_parallel_profile(sequence_parallel):
    """Its own measured subgraphs, and each collective as long as it was measured: the ranks slowed each other there."""
    model, profile = captured("gpt2", 4), made_up()
    bounds = shard(model.graph).bounds
    whole = work_of(model.graph, bounds)
    locals_ = {
        way: local_graphs(tensor_parallel(model, Share(tp=2, sequence_parallel=way)))[0] for way in (False, True)
    }
    split = [replace(size, tp=2, sequence_parallel=True, graph="of a rank") for size in profile.sizes]
    split = [replace(s, subgraphs=tuple(replace(o, forward_s=o.forward_s / 3) for o in s.subgraphs)) for s in split]
    profile = replace(profile, sizes=(*profile.sizes, *split))
    assert Profile.from_json(profile.to_json()) == profile

    def work(samples, share):
        return whole if share == WHOLE else work_of_local(whole, locals_[share.sequence_parallel])

    times_at = profile.times_at(work, lambda _: bounds)
    share = Share(tp=2, sequence_parallel=sequence_parallel)
    times = times_at(4, Accelerator(), share)
    each = np.array([(1.0 + kind) * 4 for kind in profile.sizes[0].kinds])
    if sequence_parallel:
        assert np.diff(times.forward[list(bounds)]) == pytest.approx(each / 3)
    else:
        assert 0.5 < times.forward[-1] / each.sum() < 1, "not measured: it follows from the estimates"

    cost = CostModel(
        profile.measured(Cluster(nodes=(Node(devices=2),), device="cpu")), TrainingOptions(), work, times_at=times_at
    )
    plan = Plan(
        graph=model.graph.fingerprint,
        dp=1,
        tp=2,
        pp=1,
        global_batch=8,
        micro_batch_size=4,
        schedule="gpipe",
        stages=stages_between((0, len(model.graph.nodes))),
        placement=place_ranks(dp=1, pp=1, tp=2),
        seed=1,
        sequence_parallel=sequence_parallel,
    )
    collectives = sum(
        getattr(profile.collectives, one.collective.name.lower()).interpolate(2, one.size)
        for one in work(4, share).exchanges
    )
    assert collectives > 0
    compute = 1.5 * (times.forward[-1] + times.backward[-1])
    costs = cost.costs(plan)
    assert 1.5 * (costs.forward[0] + costs.backward[0]) == pytest.approx(compute + collectives)
    assert costs.shared_machines[0].slowdown_of(2) == 1.5


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"setting": replace(SETTING, device="cuda")}, "it was measured with device cuda, but cpu is needed"),
        ({"setting": replace(SETTING, threads=4)}, "it was measured with threads 4, but 1 is needed"),
        ({"setting": replace(SETTING, devices_per_node=8)}, "it was measured with devices per node 8, but 2 is needed"),
        ({"setting": replace(SETTING, accelerator="T4")}, "it was measured with accelerator T4, but device is needed"),
    ],
)
def test_a_profile_of_another_setting_or_model_is_refused(change, words):
    profile = made_up()
    profile.check(SETTING, lambda samples: captured("gpt2", samples).graph.fingerprint)
    with pytest.raises(ProfileError, match=words):
        replace(profile, **change).check(SETTING, lambda samples: captured("gpt2", samples).graph.fingerprint)
    words = r"it was measured on GPT2LMHeadModel of tiny .graph .*, but this model has graph .*"
    with pytest.raises(ProfileError, match=words):
        profile.check(SETTING, lambda samples: captured("bert", samples).graph.fingerprint)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda text: text[:-1], "profile: Invalid JSON"),
        (lambda text: text.replace('"threads"', '"strings"'), "setting.threads: "),
        (lambda text: text.replace('"schema": 2', '"schema": 1'), "schema: 1 is not a version .*: measure the machine"),
        (lambda text: text.replace('"slowdown": [', '"slowdown": ["no", '), "slowdown.0: "),
    ],
)
def test_a_damaged_profile_is_refused(change, words):
    with pytest.raises(ProfileError, match=words):
        Profile.from_json(change(made_up().to_json()))
