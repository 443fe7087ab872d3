"""RaNNC's candidate stages: their names, what is run of them, and a search by their measured times."""

import random
from functools import cache, partial
from math import inf

import pytest

from auto3d.capture.interpolate import interpolate
from auto3d.partition.cost import analytic
from auto3d.partition.methods.rannc import rannc
from auto3d.partition.methods.rannc.atomic import constant_operations
from auto3d.partition.methods.rannc.blocks import form_blocks
from auto3d.partition.methods.rannc.candidates import candidate_names, candidate_stages
from auto3d.partition.methods.rannc.operation_profile import OperationProfiles
from auto3d.partition.methods.rannc.stages import StageSearch, form_stages
from auto3d.partition.stage import PartitionError
from tests.models import captured
from tests.partition.random_graphs import random_graph
from tests.partition.test_rannc_blocks import units_of
from tests.partition.test_rannc_stages import every_way

DEVICES, BATCH = 4, 8
SCARCE = 0.45  # fraction of the memory of one stage at which RaNNC takes two


def graph_at(samples: int):
    return interpolate(captured("gpt2", 2).graph, captured("gpt2", 3).graph, samples)


def costs_at(samples: int):
    return analytic(graph_at(samples), latency_s=1e-6, bandwidth=1e9)


def profiles(memory_bytes: float = inf) -> OperationProfiles:
    limited = partial(analytic, latency_s=1e-6, bandwidth=1e9, memory_bytes=memory_bytes)
    return OperationProfiles(graph_at, lambda size: limited(graph_at(size)), smallest=1, largest=BATCH)


def blocks_of(graph, count: int):
    return form_blocks(units_of(graph), count)


def test_a_run_is_named_by_its_operations():
    """Two runs have one name if and only if they have the same operations, also of other blocks."""
    chance = random.Random(3)
    for graph in (graph_at(1), *(random_graph(chance, 30) for _ in range(20))):
        operations: dict[str, set[frozenset[int]]] = {}
        runs = 0
        for count in (3, 5, 8):
            blocks = blocks_of(graph, count)
            for (first, last), name in candidate_names(graph, blocks).items():
                inside = frozenset(sub.operation for block in blocks[first : last + 1] for sub in block)
                operations.setdefault(name, set()).add(inside)
                runs += 1
        assert all(len(each) == 1 for each in operations.values())
        assert len(set.union(*operations.values())) == len(operations) < runs


def test_what_is_run_of_a_candidate_is_its_stage_at_another_size():
    """Every run that fits a device, with the operations of its blocks and no others but constants."""
    graph, other = graph_at(1), captured("gpt2", 4).graph
    blocks = blocks_of(graph, 6)
    constant = {
        node.name for node, is_constant in zip(other.nodes, constant_operations(other), strict=True) if is_constant
    }
    names = candidate_names(graph, blocks)
    found = dict(candidate_stages(profiles(), blocks, other))
    assert list(found) == list(names.values())
    for (first, last), name in names.items():
        inside = {graph.nodes[sub.operation].name for block in blocks[first : last + 1] for sub in block}
        assert set(found[name].nodes) - constant == inside
    scarce = dict(candidate_stages(profiles(1.5e6), blocks, other))
    assert 0 < len(scarce) < len(found)
    assert names[0, 5] not in scarce, "the whole model needs more"
    with pytest.raises(PartitionError, match="are not those at"):
        list(candidate_stages(profiles(), blocks, captured("bert", 2).graph))


@pytest.mark.parametrize("measured_share", [1.0, 0.5])
def test_algorithm_1_is_exact_with_measured_candidates(measured_share):
    """Brute force over all stages and replicas; a run that was not measured adds up its operations."""
    chance = random.Random(11)
    graph, known = graph_at(1), profiles()
    blocks = blocks_of(graph, 5)
    changed = 0
    for _ in range(6):
        factor = {
            name: (chance.uniform(0.2, 5), chance.uniform(0.2, 5))
            for name in candidate_names(graph, blocks).values()
            if chance.random() <= measured_share
        }

        def seconds(name: str, samples: int, factor=factor) -> tuple[float, float] | None:
            return tuple(1e-5 * samples * each for each in factor[name]) if name in factor else None

        settings = {"nodes": 1, "devices_per_node": DEVICES, "global_batch": BATCH}
        search = StageSearch(blocks, known, stage_seconds=seconds, **settings)
        assert (search.candidates, search.measured_candidates) == (15, len(factor))
        added_up = StageSearch(blocks, known, **settings)
        assert added_up.measured_candidates == 0
        names = candidate_names(graph, blocks)
        for stages, micro_batches in ((2, 1), (2, 2), (3, 2)):
            choices = search._choices(DEVICES, 1, micro_batches, checkpointing=True)

            def passes(more, first, last, *, size=micro_batches, seconds=seconds, names=names, added_up=added_up):
                samples = -(-BATCH // (size * (more + 1)))
                costs, run = added_up._costs_of(samples), (first, last)
                forward, backward = seconds(names[run], samples) or (costs.forward_s[run], costs.backward_s[run])
                return forward + costs.send_s[run], forward + backward + costs.send_back_s[run]

            objective = {
                tuple(way): sum(map(max, zip(*(passes(*run) for run in way), strict=True)))
                for way in every_way(len(blocks), stages, DEVICES)
            }
            found = form_stages(choices, stages, DEVICES)
            chosen = tuple((run.replicas - 1, run.first, run.last) for run in found)
            assert objective[chosen] == pytest.approx(min(objective.values()))
            others = form_stages(added_up._choices(DEVICES, 1, micro_batches, checkpointing=True), stages, DEVICES)
            changed += others != found
    assert changed > 9


def test_rannc_takes_the_stages_that_were_measured_fastest():
    """Two stages, as memory demands, are those that take next to nothing by measurement."""
    settings = {"nodes": 1, "devices_per_node": 2, "global_batch": BATCH, "blocks": 6}
    (whole,) = rannc(graph_at, costs_at, **settings).memory_bytes
    scarce = partial(analytic, latency_s=1e-6, bandwidth=1e9, memory_bytes=SCARCE * whole)
    by_size = cache(lambda size: scarce(graph_at(size)))
    added_up = rannc(graph_at, by_size, **settings)
    assert (len(added_up.stages), added_up.candidates, added_up.measured_candidates) == (2, 21, 0)
    measured: list[str] = []

    def slow(name: str, samples: int) -> tuple[float, float]:
        measured.append(name)
        return 1.0, 1.0

    rannc(graph_at, by_size, stage_seconds=slow, **settings)
    names = list(dict.fromkeys(measured))  # by first block, then by last block
    place = {run: names[number] for number, run in enumerate((a, b) for a in range(6) for b in range(a, 6))}
    taken = set()
    for cut in range(1, 6):
        fast = {place[0, cut - 1], place[cut, 5]}
        found = rannc(
            graph_at,
            by_size,
            stage_seconds=lambda name, samples, fast=fast: (1e-9, 1e-9) if name in fast else (1.0, 1.0),
            **settings,
        )
        assert found.measured_candidates == 21
        if found.blocks == (cut, 6 - cut):
            taken.add(cut)
    assert len(taken) > 1, "memory allows several cuts"
