"""Uniform partition against brute force, and what a cut stage holds and sent_values."""

import random
from itertools import combinations, pairwise

import pytest

from auto3d.capture.graph import Graph, GraphNode, Value
from auto3d.partition.methods.uniform import TOLERANCE, uniform
from auto3d.partition.stage import PartitionError, crossing_bytes, cut, same_stages
from auto3d.plan import PlanError, stages_between, stages_of_operations
from launch.model.build import captured_model
from launch.recipe.load import load
from tests.models import captured


def chain(flops: list[int], sizes: list[int]) -> Graph:
    """Operation i reads what operation i - 1 made, ``sizes[i - 1]`` bytes."""
    nodes = tuple(
        GraphNode(
            name=f"n{i}",
            operator="op",
            reads=(f"n{i - 1}",) if i else ("x",),
            state=(),
            outputs=(Value(f"n{i}", (size,), "int8", 1, True),),
            module="",
            flops=cost,
            backward_flops=2 * cost,
            saves=(),
            saved_bytes=0,
            from_inputs=False,
        )
        for i, (cost, size) in enumerate(zip(flops, sizes, strict=True))
    )
    x = Value("x", (1,), "int8", 1, True)
    return Graph(
        nodes=nodes,
        inputs={"x": x},
        parameters={},
        buffers={},
        constants={},
        trained=frozenset(),
        written_buffers=frozenset(),
        loss=nodes[-1].name,
        micro_batch_size=1,
        fingerprint="",
    )


def test_best_balance_then_fewest_bytes_as_by_brute_force():
    chance = random.Random(1)
    for _ in range(300):
        size = chance.randint(2, 11)
        flops = [chance.choice([0, 0, 1, 5, 20, 100]) for _ in range(size)]
        sizes = [chance.randint(1, 50) for _ in range(size)]
        stages = chance.randint(1, min(5, size))
        graph = chain(flops, sizes)

        possible = {}  # bounds -> (largest stage, bytes)
        for inner in combinations(range(1, size), stages - 1):
            bounds = [0, *inner, size]
            parts = [sum(flops[a:b]) for a, b in pairwise(bounds)]
            if min(parts) > 0 or (stages == 1):
                possible[tuple(bounds)] = (max(parts), sum(sizes[i - 1] for i in inner))
        if not possible:
            with pytest.raises(PartitionError, match=f"{stages} stages"):
                uniform(graph, stages)
            continue
        limit = int(min(largest for largest, _ in possible.values()) * (1 + TOLERANCE))
        fewest = min(crossing for largest, crossing in possible.values() if largest <= limit)
        found = uniform(graph, stages)
        largest, crossing = possible[(0, *(stage.operations[-1][1] for stage in found))]
        assert largest <= limit
        assert crossing == fewest


@pytest.mark.parametrize("model", ["gpt2", "llama", "t5"])
def test_stages_of_one_micro_batch_size_are_those_of_another(model):
    """At 1 GPT-2 and LLaMA expand nothing, and have fewer operations."""
    one, two = captured(model, 1).graph, captured(model, 2).graph
    constant = {node.name for graph in (one, two) for node in graph.nodes if node.from_inputs}
    stages = uniform(two, 4)
    found = same_stages(stages, two, one)
    for at_two, at_one in zip(cut(two, stages), cut(one, found), strict=True):
        assert set(at_two.nodes) - constant == set(at_one.nodes) - constant
        assert (at_two.inputs, at_two.state) == (at_one.inputs, at_one.state)
        assert [t.value.name for t in at_two.sent] == [t.value.name for t in at_one.sent]
    with pytest.raises(PartitionError, match="operations at micro-batch size 2 are not those at 2;"):
        same_stages(stages, two, captured("bert", 2).graph)


def test_gpt2_is_cut_between_blocks():
    """One tensor crosses each cut: masks and positions are repeated, not sent."""
    recipe = load("tiny")
    graph = captured_model(recipe, 2).graph
    stages = cut(graph, uniform(graph, 4))
    assert [len(stage.sent) for stage in stages] == [1, 1, 1, 0]
    assert [len(stage.received) for stage in stages] == [0, 1, 1, 1]
    assert all(transfer.value.shape == (2, 128, 128) for stage in stages for transfer in stage.sent)
    assert [stage.inputs for stage in stages] == [("input_ids",), (), (), ("labels",)]
    assert [stage.has_loss for stage in stages] == [False, False, False, True]
    for stage in stages:
        layers = {int(name.split(".")[2]) for name in stage.state if ".h." in name}
        assert layers == {2 * stage.index, 2 * stage.index + 1}
    tied = "transformer.wte.weight"
    assert [tied in stage.state for stage in stages] == [True, False, False, True]
    assert sum(stage.flops for stage in stages) == sum(node.flops for node in graph.nodes)


def test_every_operation_runs_once_and_only_input_operations_are_repeated():
    graph = captured("llama", 2).graph
    stages = cut(graph, uniform(graph, 4))
    times = {node.name: sum(node.name in stage.nodes for stage in stages) for node in graph.nodes}
    for node in graph.nodes:
        assert times[node.name] == 1 or (node.from_inputs and times[node.name] > 0), node.name
    assert any(count > 1 for count in times.values())


def test_crossing_bytes_of_a_skip():
    graph = captured("residual", 2).graph
    crossing = crossing_bytes(graph)
    assert len(crossing) == len(graph.nodes) + 1
    assert crossing[0] == crossing[-1] == 0
    assert max(crossing) >= 2 * 2 * 16 * 4  # the skip and the path beside it: two tensors of [2, 16] floats


@pytest.mark.parametrize("stages", [5, 8, 11])
def test_no_stage_is_ever_empty(stages):
    graph = captured("gpt2", 2).graph
    for stage in cut(graph, uniform(graph, stages)):
        assert stage.flops > 0


def test_too_many_stages_are_refused():
    graph = captured("residual", 2).graph
    with pytest.raises(PartitionError, match="5 stages, but only 4 operations"):
        uniform(graph, 5)


def test_stages_of_another_size_are_refused():
    graph = captured("residual", 2).graph
    with pytest.raises(PlanError, match=f"they end at operation 2; the model has {len(graph.nodes)}"):
        cut(graph, stages_between([0, 3]))


@pytest.mark.parametrize("stages", [2, 3])
def test_operations_on_a_written_buffer_stay_on_one_stage(stages):
    graph = captured("averaging", 2).graph
    for buffer in ("average", "mean_loss"):
        assert sum(buffer in stage.state for stage in cut(graph, uniform(graph, stages))) == 1


def test_stages_whose_values_go_backwards_are_refused():
    graph = captured("residual", 2).graph
    stage_of = [0] * len(graph.nodes)
    stage_of[1] = 1  # makes what operation 2, on stage 0, uses
    with pytest.raises(PlanError, match="stage 0 uses activation_relu, which the later stage 1 makes"):
        cut(graph, stages_of_operations(stage_of))
