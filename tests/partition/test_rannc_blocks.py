"""RaNNC's atomic and block levels against brute force, on random graphs and on the models of the other tests."""

import random
from itertools import pairwise, product

import pytest

from auto3d.capture.graph import Graph
from auto3d.partition.cost import analytic, parameter_bytes, saved_bytes
from auto3d.partition.methods.rannc.atomic import (
    Subcomponent,
    atomic_subcomponents,
    constant_operations,
    stage_of_operations,
)
from auto3d.partition.methods.rannc.blocks import form_blocks
from auto3d.partition.methods.rannc.dag import MergingGraph, topological_order
from auto3d.partition.methods.rannc.operation_profile import OperationProfiles
from auto3d.partition.methods.rannc.units import Units, find_units
from auto3d.partition.stage import cut
from auto3d.plan import stages_of_operations
from tests.models import MODELS, captured
from tests.partition.random_graphs import random_graph


def units_of(graph: Graph, memory_bytes: float = float("inf")) -> Units:
    costs = analytic(graph, flops_per_s=1e3, memory_bandwidth=1e9, memory_bytes=memory_bytes)
    profile = OperationProfiles(lambda _: graph, lambda _: costs, smallest=1, largest=1).at(1)
    subcomponents = atomic_subcomponents(graph)
    return find_units(
        graph,
        subcomponents,
        times=profile,
        sizes=profile,
        state_factor=costs.state_factor,
        memory_bytes=memory_bytes,
    )


def reachable(after: dict[int, set[int]]) -> dict[int, set[int]]:
    """Per node, all nodes that it leads to, by brute force; itself only if it is on a cycle."""
    found = {}
    for node in after:
        seen, pending = set(), list(after[node])
        while pending:
            each = pending.pop()
            if each not in seen:
                seen.add(each)
                pending.extend(after[each])
        found[node] = seen
    return found


def check_blocks(graph: Graph, blocks: list[tuple[Subcomponent, ...]]) -> None:
    """Assert: each subcomponent once, values only go forward, convex blocks, one block for each written buffer."""
    operations = [sub.operation for block in blocks for sub in block]
    assert sorted(operations) == [sub.operation for sub in atomic_subcomponents(graph)]
    block_of = {sub.operation: index for index, block in enumerate(blocks) for sub in block}
    after: dict[int, set[int]] = {operation: set() for operation in operations}
    for operation in operations:
        for name in graph.nodes[operation].reads:
            if graph.producer.get(name) in after:
                after[graph.producer[name]].add(operation)
                assert block_of[graph.producer[name]] <= block_of[operation]
    leads_to = reachable(after)
    for block in blocks:
        inside = {sub.operation for sub in block}
        for operation in inside:
            for outside in leads_to[operation] - inside:
                assert inside.isdisjoint(leads_to[outside])
    for buffer in graph.written_buffers:
        users = {block_of[position] for position, node in enumerate(graph.nodes) if buffer in node.state}
        assert len(users) <= 1


@pytest.mark.parametrize("model", MODELS)
def test_atomic_subcomponents_have_one_non_constant_operation_and_their_own_constants(model):
    graph = captured(model, 2).graph
    constant = constant_operations(graph)
    subcomponents = atomic_subcomponents(graph)
    for sub in subcomponents:
        assert [position for position in sub.positions if not constant[position]] == [sub.operation]
        own = {value.name for position in sub.positions for value in graph.nodes[position].outputs}
        for position in sub.positions:  # every constant operation that it needs is inside
            for name in set(graph.nodes[position].reads) & graph.producer.keys() - own:
                assert not constant[graph.producer[name]]
    operations = [sub.operation for sub in subcomponents]
    assert operations == [position for position in range(len(graph.nodes)) if not constant[position]]
    for position, node in enumerate(graph.nodes):
        if constant[position]:
            assert graph.written_buffers.isdisjoint(node.state)
            assert node.from_inputs or all(name not in graph.inputs for name in node.reads)
        else:
            assert not node.from_inputs


def test_constants_are_cloned_and_not_sent():
    graph = captured("llama", 2).graph  # the rotary tables and the mask are used in every layer
    holders = [sub for sub in atomic_subcomponents(graph) if sub.constants]
    clones = [position for sub in holders for position in sub.constants]
    assert max(clones.count(position) for position in set(clones)) >= 4
    stages = stages_of_operations(stage_of_operations(graph, [[sub] for sub in atomic_subcomponents(graph)]))
    names = {node.name for node in graph.nodes if node.from_inputs}
    for stage in cut(
        graph, stages
    ):  # one stage per subcomponent: each has copies of its constants, and no constant is sent
        assert names.isdisjoint(transfer.value.name for transfer in stage.sent)


def test_merges_keep_the_graph_acyclic_and_refuse_nothing_else():
    chance = random.Random(2)
    for _ in range(200):
        size = chance.randint(2, 14)
        after = [{b for b in range(a + 1, size) if chance.random() < 0.25} for a in range(size)]
        graph = MergingGraph(after)
        alive = set(range(size))
        for _ in range(30):
            pairs = [(a, b) for a in alive for b in graph.neighbours(a)]
            if not pairs:
                break
            node, other = chance.choice(pairs)
            now = {each: set(graph.after[each]) for each in alive}
            first, last = (node, other) if other in now[node] else (other, node)
            leads_to = reachable(now)
            indirect = any(last in leads_to[each] for each in now[first] - {last})
            assert graph.merge(node, other) == (not indirect)
            if not indirect:
                alive.remove(other)
            for each in alive:
                assert graph.after[each] <= alive
                assert all(graph.place[each] < graph.place[b] for b in graph.after[each])
                assert all(each in graph.before[b] for b in graph.after[each])


def test_blocks_of_random_graphs_are_convex_in_sequence_and_few():
    chance = random.Random(3)
    for _ in range(150):
        graph = random_graph(chance, chance.randint(1, 40), buffers=chance.randint(0, 3))
        wanted = chance.randint(1, 8)
        units = units_of(graph)
        blocks = form_blocks(units, wanted)
        check_blocks(graph, blocks)
        assert len(blocks) == min(wanted, len(units.members))


def test_blocks_keep_to_memory_where_they_can():
    chance = random.Random(4)
    more = 0
    for _ in range(100):
        graph = random_graph(chance, chance.randint(5, 40))
        limit = chance.choice([150, 300, 600])
        units = units_of(graph, limit)
        wanted = chance.randint(1, 8)
        blocks = form_blocks(units, wanted)
        check_blocks(graph, blocks)

        def taken(block: tuple[Subcomponent, ...], graph: Graph = graph) -> float:
            positions = {position for sub in block for position in sub.positions}
            return 4.0 * parameter_bytes(graph, positions) + saved_bytes(graph, positions)

        of_units = [taken(own) for own in units.members]
        if max(of_units) <= limit:
            assert max(map(taken, blocks)) <= limit
        if len(blocks) > wanted:
            more += 1
            assert all(taken(a + b) > limit for a, b in pairwise(blocks))
    assert more > 10


@pytest.mark.parametrize(("model", "wanted"), product(MODELS, (2, 4, 8)))
def test_blocks_of_models(model, wanted):
    graph = captured(model, 2).graph
    units = units_of(graph)
    blocks = form_blocks(units, wanted)
    check_blocks(graph, blocks)
    assert len(blocks) <= wanted
    stages = stages_of_operations(stage_of_operations(graph, blocks))
    assert len(cut(graph, stages)) == len(blocks)


def test_blocks_are_balanced():
    """Four layers and a head as long as one layer: eight equal blocks would send much more."""
    graph = captured("bert", 8).graph
    for wanted, most in ((2, 1.15), (4, 1.3), (8, 1.7)):
        units = units_of(graph)
        seconds = dict(zip((own[0].operation for own in units.members), units.seconds, strict=True))
        found = [sum(seconds[sub.operation] for sub in block) for block in form_blocks(units, wanted)]
        assert max(found) <= most * sum(found) / wanted


def test_topological_order_finds_cycles():
    assert topological_order([{1}, {2}, set()]) == [0, 1, 2]
    assert topological_order([{1}, {0}]) is None
