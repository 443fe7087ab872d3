"""RaNNC's stage level against brute force, and all of RaNNC on the models of the other tests."""

import random
import re
from dataclasses import replace
from itertools import combinations, pairwise

import numpy as np
import pytest

from auto3d.capture.graph import Graph, Value
from auto3d.capture.interpolate import interpolate
from auto3d.partition.cost import analytic, parameter_bytes, saved_bytes
from auto3d.partition.methods.rannc import RanncPartition, rannc
from auto3d.partition.methods.rannc.atomic import stage_of_operations
from auto3d.partition.methods.rannc.blocks import form_blocks
from auto3d.partition.methods.rannc.operation_profile import OperationProfiles
from auto3d.partition.methods.rannc.runs import Runs
from auto3d.partition.methods.rannc.stages import Choices, StageSearch, form_stages
from auto3d.partition.stage import PartitionError, cut
from auto3d.plan import stages_of_operations
from tests.models import MODELS, captured
from tests.partition.random_graphs import random_graph
from tests.partition.test_rannc_blocks import units_of
from tests.soak import soak

inf = float("inf")


def every_way(blocks: int, stages: int, devices: int) -> list[list[tuple[int, int, int]]]:
    """All divisions into stages with all replica counts: a (replicas - 1, first block, last block) for each stage."""
    found = []
    for bounds in combinations(range(1, blocks), stages - 1):
        for ends in combinations(range(1, devices), stages - 1):
            runs = pairwise([0, *bounds, blocks])
            shares = pairwise([0, *ends, devices])
            found.append([(b - a - 1, first, last - 1) for (first, last), (a, b) in zip(runs, shares, strict=True)])
    return found


def random_choices(chance: random.Random, blocks: int, devices: int) -> Choices:
    """Random choices: more replicas are mostly faster, some are impossible, forward and backward loosely related."""
    shape = (devices, blocks, blocks)
    forward, backward, memory = np.full(shape, inf), np.full(shape, inf), np.full(shape, inf)
    weights = [(chance.randint(1, 9), chance.randint(1, 9), chance.randint(1, 9)) for _ in range(blocks)]
    for replicas in range(devices):
        for first in range(blocks):
            for last in range(first, blocks):
                if chance.random() < 0.1:
                    continue
                own = weights[first : last + 1]
                share = 1 / (replicas + 1)
                forward[replicas, first, last] = share * sum(w[0] for w in own) + chance.random()
                backward[replicas, first, last] = share * sum(w[1] for w in own) + chance.random()
                memory[replicas, first, last] = sum(w[2] for w in own) * (0.5 + share / 2)
    return Choices(forward_s=forward, backward_s=backward, memory_bytes=memory)


def published(choices: Choices, stages: int, devices: int) -> float:
    """Algorithm 1 as published, except for its start and d_min: it keeps the best sum of each state."""
    blocks = choices.forward_s.shape[-1]
    known = {(0, 0): (0.0, 0.0)}
    for _ in range(stages):
        reached: dict[tuple[int, int], tuple[float, float]] = {}
        for (done, used), (forward, backward) in known.items():
            for last in range(done, blocks):
                for replicas in range(devices - used):
                    place = replicas, done, last
                    times = max(forward, choices.forward_s[place]), max(backward, choices.backward_s[place])
                    state = last + 1, used + replicas + 1
                    if sum(times) < sum(reached.get(state, (inf, inf))):
                        reached[state] = times
        known = reached
    return sum(known.get((blocks, devices), (inf, inf)))


def test_stages_and_replicas_as_by_brute_force():
    chance = random.Random(5)
    infeasible = unequal = improved = 0
    for _ in range(300):
        blocks, devices = chance.randint(1, 6), chance.randint(1, 6)
        stages = chance.randint(1, min(blocks, devices))
        limit = chance.choice([inf, 25, 15, 10])
        choices = random_choices(chance, blocks, devices)
        best = inf
        for way in every_way(blocks, stages, devices):
            if all(choices.memory_bytes[run] <= limit for run in way):
                slowest = [max(table[run] for run in way) for table in (choices.forward_s, choices.backward_s)]
                best = min(best, sum(slowest))
        found = form_stages(choices.fitting(limit), stages, devices)
        if best == inf:
            assert found is None
            infeasible += 1
            continue
        places = [(run.replicas - 1, run.first, run.last) for run in found]
        assert places in every_way(blocks, stages, devices)
        assert all(choices.memory_bytes[place] <= limit for place in places)
        slowest = [max(table[place] for place in places) for table in (choices.forward_s, choices.backward_s)]
        assert sum(slowest) == best
        unequal += len({run.replicas for run in found}) > 1
        improved += published(choices.fitting(limit), stages, devices) > best
    assert infeasible > 30
    assert unequal > 30
    assert improved  # the published algorithm is sometimes worse, see ``form_stages``


def test_costs_of_runs_are_those_of_the_stages_that_they_make():
    chance = random.Random(6)
    for _ in range(40):
        graph = random_graph(chance, chance.randint(5, 40), parameter_constants=False)
        costs = analytic(graph, latency_s=0.5, bandwidth=10.0)
        profiles = OperationProfiles(lambda _, graph=graph: graph, lambda _, costs=costs: costs, smallest=1, largest=1)
        blocks = form_blocks(units_of(graph), 6)
        found = Runs(graph, blocks, costs).at(profiles.at(1))
        for first in range(len(blocks)):
            for last in range(first, len(blocks)):
                groups = [blocks[:first], blocks[first : last + 1], blocks[last + 1 :]]
                parts = [[sub for block in group for sub in block] for group in groups if group]
                stages = stages_of_operations(stage_of_operations(graph, parts))
                stage = cut(graph, stages)[1 if first else 0]
                used = {position for sub in parts[1 if first else 0] for position in sub.positions}
                sent = {transfer.value.name: transfer.value.bytes for transfer in stage.sent}
                received = [transfer.value for transfer in stage.received]
                inputs = sum(graph.inputs[name].bytes for name in stage.inputs)
                back = sum(value.bytes for value in received if value.differentiable)
                run = (first, last)
                assert found.forward_s[run] == pytest.approx(sum(costs.forward_s[position] for position in used))
                assert found.backward_s[run] == pytest.approx(sum(costs.backward_s[position] for position in used))
                assert found.saved_bytes[run] == saved_bytes(graph, used)
                assert found.state_bytes[run] == 4 * parameter_bytes(graph, used)
                assert found.send_s[run] == pytest.approx(costs.message_s(sum(sent.values())))
                assert found.send_back_s[run] == pytest.approx(costs.message_s(back))
                assert found.received_bytes[run] == sum(value.bytes for value in received) + inputs


def every_form(
    runs: Runs, profiles: OperationProfiles, *, nodes: int, per_node: int, batch: int
) -> dict[tuple[int, int], list[float]]:
    """(devices of a pipeline, stages) -> the objective of algorithm 1 for each possible number of micro-batches."""
    limit, found = profiles.costs.memory_bytes, {}
    for used in (n for n in range(1, nodes + 1) if nodes % n == 0):
        pipelines, devices = nodes // used, used * per_node
        for micro_batches in (2**power for power in range(9) if 2**power * pipelines <= batch):
            for stages in range(1, min(devices, runs.blocks) + 1):
                best = inf
                for way in every_way(runs.blocks, stages, devices):
                    forward, backward, fits = [], [], True
                    for more, first, last in way:
                        samples = batch / (pipelines * micro_batches * (more + 1))
                        if samples < 1:
                            fits = False
                            break
                        costs, run = runs.at(profiles.at(int(np.ceil(samples)))), (first, last)
                        inputs = costs.received_bytes[run] * (micro_batches if stages > 1 else 1)
                        fits = fits and costs.state_bytes[run] + costs.saved_bytes[run] + inputs <= limit
                        again = costs.forward_s[run] if stages > 1 else 0.0
                        forward.append(costs.forward_s[run] + costs.send_s[run])
                        backward.append(costs.backward_s[run] + again + costs.send_back_s[run])
                    if fits:
                        best = min(best, max(forward) + max(backward))
                if best < inf:
                    found.setdefault((devices, stages), []).append(best)
    return found


def of_size(graph: Graph, samples: int) -> Graph:
    def larger(made: Value) -> Value:
        return replace(made, shape=(samples, *made.shape))

    nodes = [replace(node, outputs=tuple(map(larger, node.outputs))) for node in graph.nodes]
    return replace(graph, nodes=tuple(nodes), inputs={name: larger(made) for name, made in graph.inputs.items()})


def test_the_search_takes_the_fewest_nodes_and_stages_that_fit():
    chance = random.Random(7)
    several = 0
    for _ in range(40):
        graph = random_graph(chance, 20, parameters=20)
        nodes, per_node, batch = chance.choice([(2, 2, 6), (4, 1, 8), (3, 1, 6), (6, 1, 12)])

        def graph_at(size: int, graph=graph):
            return of_size(graph, size)

        limit = chance.choice([450, 550, 650, 750])

        def costs_at(size: int, limit=limit, graph_at=graph_at):
            return analytic(graph_at(size), latency_s=1e-12, memory_bytes=limit)

        profiles = OperationProfiles(graph_at, costs_at, smallest=1, largest=batch)
        blocks = form_blocks(units_of(graph, limit), 5)
        if len(blocks) > 6:
            continue
        search = StageSearch(blocks, profiles, nodes=nodes, devices_per_node=per_node, global_batch=batch)
        found = search.search()
        possible = every_form(search.runs, profiles, nodes=nodes, per_node=per_node, batch=batch)
        # a pipeline has more stages than a pipeline of fewer nodes could have
        smaller = {d: max((e for e in range(1, d) if nodes * per_node % e == 0 and e % per_node == 0), default=0)
                   for d, _ in possible}  # fmt: skip
        possible = {key: values for key, values in possible.items() if key[1] > smaller[key[0]]}
        assert (found is None) == (not possible)
        if found is None:
            continue
        devices = nodes * per_node // found.pipelines
        assert (devices, len(found.runs)) == min(possible)
        assert sum(run.replicas for run in found.runs) == devices
        objective = max(found.forward_s) + max(found.backward_s)
        assert any(objective == pytest.approx(value) for value in possible[devices, len(found.runs)])
        several += len(found.runs) > 1
    assert several > 5


def test_sizes_between_samples_are_interpolated():
    def graph_at(size: int) -> Graph:
        return captured("bert", size).graph

    profiles = OperationProfiles(graph_at, lambda size: analytic(graph_at(size)), smallest=1, largest=12)
    exact = OperationProfiles(graph_at, lambda size: analytic(graph_at(size)), smallest=6, largest=6).at(6)
    found = profiles.at(6)  # between the samples 4 and 8
    assert (found.value_bytes == exact.value_bytes).all()
    assert (found.internal_bytes == exact.internal_bytes).all()
    assert found.forward_s == pytest.approx(exact.forward_s, rel=0.05)
    assert profiles.at(12).value_bytes[0] == 12 * profiles.at(1).value_bytes[0]


def partition(model: str, memory_bytes: float, **settings: int) -> RanncPartition:
    def graph_at(size: int) -> Graph:
        return interpolate(captured(model, 2).graph, captured(model, 3).graph, size)

    def costs_at(size: int):
        return analytic(graph_at(size), memory_bytes=memory_bytes, latency_s=1e-8)

    settings = {
        "nodes": 2,
        "devices_per_node": 2,
        "global_batch": 12,
        "blocks": 8,
        "smallest_micro_batch": 2,
    } | settings
    return rannc(graph_at, costs_at, **settings)


KINDS = ("gpt2-dropout", "t5", "residual")


@pytest.mark.parametrize("model", [*KINDS, *soak(*(model for model in MODELS if model not in KINDS))])
def test_stages_of_models_fit_and_are_never_empty(model):
    """With memory from enough for one device down to none."""
    graph = captured(model, 2).graph
    constant = {node.name for node in graph.nodes if node.from_inputs}
    enough = partition(model, inf)
    assert (len(enough.stages), enough.replicas, enough.pipelines) == (1, (4,), 2)
    stages_found = {1}
    memory_bytes = enough.memory_bytes[0]
    while memory_bytes > 1000:
        memory_bytes *= 0.85
        try:
            found = partition(model, memory_bytes)
        except PartitionError:
            break
        assert max(found.memory_bytes) <= memory_bytes
        assert sum(found.replicas) == 4
        assert sum(found.blocks) <= 8
        stages_found.add(len(found.stages))
        for stage in cut(graph, found.stages):
            assert set(stage.nodes) - constant
    if model != "reused":  # its layers are used at both ends, so every stage would hold the whole model
        assert stages_found & {2, 3, 4}


@pytest.mark.parametrize("model", ["gpt2", "bert", "t5"])
def test_the_memory_that_is_called_enough_is_enough(model):
    with pytest.raises(PartitionError, match="no stages fit 4 devices of") as refused:
        partition(model, 1000.0)
    message = str(refused.value)
    assert "\n" not in message
    need = float(re.search(r"that is enough is ([\d.]+) MiB", message)[1])
    assert len(partition(model, need * 2**20).stages) > 1


def test_a_batch_that_is_too_small_is_refused():
    with pytest.raises(PartitionError, match="global_batch: 2 samples are too few for 32 devices and 8 blocks; 8 "):
        partition("bert", inf, global_batch=2, nodes=4, devices_per_node=8)
    assert partition("bert", inf, global_batch=8, nodes=4, devices_per_node=8)
    with pytest.raises(PartitionError, match="nodes: 0 is not possible; it must be 1 or more"):
        partition("bert", inf, nodes=0)
    with pytest.raises(PartitionError, match="smallest_micro_batch: 16 samples are more than the global batch of 12"):
        partition("bert", inf, smallest_micro_batch=16)


def test_replicas_get_equal_slices_where_a_plan_needs_them():
    """12 samples divide equally among five devices only if no stage has all five."""
    free = partition("bert", inf, nodes=1, devices_per_node=5)
    assert (len(free.stages), free.replicas) == (1, (5,))
    equal = partition("bert", inf, nodes=1, devices_per_node=5, equal_slices=True, smallest_micro_batch=1)
    assert sum(equal.replicas) == 5
    assert all(12 % (equal.micro_batches * replicas) == 0 for replicas in equal.replicas)
    assert equal.samples == tuple(12 // (equal.micro_batches * replicas) for replicas in equal.replicas)
    with pytest.raises(PartitionError, match="12 samples do not divide equally among 5 devices and 1 block; a multi"):
        partition("bert", inf, nodes=1, devices_per_node=5, equal_slices=True, blocks=1)
