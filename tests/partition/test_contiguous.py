"""Autopipe and AMP's layer assignment against brute force over all contiguous partitions of random chains."""

import random
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate, combinations, pairwise

import pytest

from auto3d.capture.graph import Graph, Value
from auto3d.partition.cost import PartitionCosts, analytic, parameter_bytes, saved_bytes
from auto3d.partition.methods import autopipe, layer_assignment
from auto3d.partition.problem import GraphProblem
from auto3d.partition.stage import PartitionError, crossing_bytes, cut
from tests.models import captured
from tests.partition.test_uniform import chain


def random_chain(chance: random.Random) -> tuple[Graph, PartitionCosts]:
    """Operations with parameters, some shared by several, that keep tensors, some of them each other's."""
    size = chance.randint(2, 10)
    graph = chain([1] * size, [chance.randint(1, 50) for _ in range(size)])
    parameters = {f"w{i}": Value(f"w{i}", (chance.randint(1, 20),), "int8", 1, True) for i in range(size // 2 + 1)}
    nodes = tuple(
        replace(
            node,
            state=tuple(chance.sample(sorted(parameters), chance.randint(0, 2))),
            saves=tuple(chance.sample(["x", *(f"n{j}" for j in range(index + 1))], chance.randint(0, 2))),
            saved_bytes=chance.choice([0, 0, 5]),
        )
        for index, node in enumerate(graph.nodes)
    )
    costs = PartitionCosts(
        forward_s=tuple(chance.choice([0.0, 0.1, 0.7, 2.0]) for _ in nodes),
        backward_s=tuple(chance.choice([0.0, 0.3, 1.1]) for _ in nodes),
        latency_s=0.05,
        bandwidth=100.0,
        memory_bytes=chance.choice([float("inf"), chance.uniform(30, 300)]),
        state_factor=4.0,
    )
    return replace(graph, nodes=nodes, parameters=parameters), costs


def every_partition(graph: Graph, costs: PartitionCosts, stages: int) -> Iterator[tuple[list[int], list[float]]]:
    """Bounds and stage times of all partitions in which every stage takes some time."""
    size = len(graph.nodes)
    for inner in combinations(range(1, size), stages - 1):
        bounds = [0, *inner, size]
        times = [sum(costs.forward_s[a:b]) + sum(costs.backward_s[a:b]) for a, b in pairwise(bounds)]
        if min(times) > 0:
            yield bounds, times


def fits(graph: Graph, costs: PartitionCosts, bounds: list[int]) -> bool:
    stages = len(bounds) - 1
    return all(
        costs.state_factor * parameter_bytes(graph, range(a, b)) + (stages - s) * saved_bytes(graph, range(a, b))
        <= costs.memory_bytes
        for s, (a, b) in enumerate(pairwise(bounds))
    )


def test_autopipe_is_the_best_as_by_brute_force():
    chance = random.Random(3)
    refused = 0
    for _ in range(300):
        graph, costs = random_chain(chance)
        stages = chance.randint(1, min(4, len(graph.nodes)))
        crossing = crossing_bytes(graph)
        possible = [
            (max(times), sum(crossing[place] for place in bounds[1:-1]))
            for bounds, times in every_partition(graph, costs, stages)
            if fits(graph, costs, bounds)
        ]
        if not possible:
            refused += 1
            with pytest.raises(PartitionError):
                autopipe.choose_stages(GraphProblem(graph=graph, costs=costs, stages=stages))
            continue
        slowest = min(slowest for slowest, _ in possible)
        fewest = min(sent for time, sent in possible if time <= slowest + 1e-12)
        found = autopipe.choose_stages(GraphProblem(graph=graph, costs=costs, stages=stages))
        bounds = [0, *(stage.operations[-1][1] for stage in found)]
        assert fits(graph, costs, bounds)
        times = [sum(costs.forward_s[a:b]) + sum(costs.backward_s[a:b]) for a, b in pairwise(bounds)]
        assert max(times) == pytest.approx(slowest, abs=1e-9)
        assert sum(crossing[place] for place in bounds[1:-1]) == fewest
    assert 30 < refused < 200


def test_layer_assignment_is_the_best_as_by_brute_force():
    chance = random.Random(4)
    for _ in range(300):
        graph, costs = random_chain(chance)
        stages = chance.randint(1, min(4, len(graph.nodes)))
        micro_batches = chance.choice([1, 2, 8, 100])
        speeds = [chance.choice([1.0, 2.0, 0.5]) for _ in range(stages)] if chance.random() < 0.5 else None
        crossing = crossing_bytes(graph)

        def pipeline(bounds, times, speeds=speeds, micro_batches=micro_batches, costs=costs, crossing=crossing):
            times = [time / speed for time, speed in zip(times, speeds or [1.0] * len(times), strict=True)]
            messages = sum(2 * costs.message_s(crossing[place]) for place in bounds[1:-1])
            return (micro_batches - 1) * max(times) + sum(times) + messages

        possible = [pipeline(bounds, times) for bounds, times in every_partition(graph, costs, stages)]
        problem = GraphProblem(
            graph=graph, costs=costs, stages=stages, micro_batches=micro_batches, speeds=tuple(speeds or ())
        )
        if not possible:
            with pytest.raises(PartitionError):
                layer_assignment.choose_stages(problem)
            continue
        found = layer_assignment.choose_stages(problem)
        bounds = [0, *(stage.operations[-1][1] for stage in found)]
        times = [sum(costs.forward_s[a:b]) + sum(costs.backward_s[a:b]) for a, b in pairwise(bounds)]
        assert pipeline(bounds, times) == pytest.approx(min(possible), abs=1e-9)


@dataclass(frozen=True, kw_only=True)
class Recomputing(GraphProblem):
    """Stages that recompute a part of their forward, each another one."""

    again: tuple[float, ...]

    @cached_property
    def before(self) -> tuple[tuple[float, ...], ...]:
        both = list(zip(self.costs.forward_s, self.costs.backward_s, strict=True))
        of = {
            one: (0.0, *accumulate((1 + one) * forward + backward for forward, backward in both)) for one in self.again
        }
        return tuple(tuple(of[one][cut] for cut in self.cuts) for one in self.again)


@pytest.mark.parametrize("order", ["falling", "any"])
def test_stages_that_recompute_unequally_are_the_best_as_by_brute_force(order):
    """Whether later stages recompute less, as under 1F1B with kept fractions, or in any order."""
    chance, refused, unlike = random.Random(order), 0, 0
    for _ in range(600):
        graph, costs = random_chain(chance)
        stages, micro_batches = chance.randint(1, min(4, len(graph.nodes))), chance.choice([1, 2, 8, 100])
        again = [chance.choice([0.0, 0.0, 0.25, 1.0]) for _ in range(stages)]
        again = tuple(sorted(again, reverse=True) if order == "falling" else again)
        crossing = crossing_bytes(graph)
        possible = [
            (bounds, [(1 + one) * sum(costs.forward_s[a:b]) + sum(costs.backward_s[a:b])
                      for one, (a, b) in zip(again, pairwise(bounds), strict=True)])
            for bounds, _ in every_partition(graph, costs, stages)
        ]  # fmt: skip

        def sent(bounds, crossing=crossing):
            return sum(crossing[place] for place in bounds[1:-1])

        def pipeline(bounds, times, micro_batches=micro_batches, costs=costs, crossing=crossing):
            messages = sum(2 * costs.message_s(crossing[place]) for place in bounds[1:-1])
            return (micro_batches - 1) * max(times) + sum(times) + messages

        problem = Recomputing(graph=graph, costs=costs, stages=stages, micro_batches=micro_batches, again=again)
        times_of = {tuple(bounds): times for bounds, times in possible}
        if possible:
            found = (0, *(stage.operations[-1][1] for stage in layer_assignment.choose_stages(problem)))
            best = min(pipeline(bounds, times) for bounds, times in possible)
            assert pipeline(found, times_of[found]) == pytest.approx(best, abs=1e-9)
        fitting = [(max(times), sent(bounds)) for bounds, times in possible if fits(graph, costs, bounds)]
        if not fitting:
            refused += 1
            with pytest.raises(PartitionError):
                autopipe.choose_stages(problem)
            continue
        slowest = min(time for time, _ in fitting)
        fewest = min(size for time, size in fitting if time <= slowest + 1e-12)
        found = (0, *(stage.operations[-1][1] for stage in autopipe.choose_stages(problem)))
        assert fits(graph, costs, list(found))
        assert max(times_of[found]) == pytest.approx(slowest, abs=1e-9)
        assert sent(found) == fewest
        alike = GraphProblem(graph=graph, costs=costs, stages=stages)
        unlike += (0, *(stage.operations[-1][1] for stage in autopipe.choose_stages(alike))) != found
    assert 60 < refused < 400
    assert unlike > 60, "otherwise one sequence of times for all stages would do"


@pytest.mark.parametrize("model", ["gpt2", "bert", "t5", "vit"])
@pytest.mark.parametrize("stages", [2, 4])
def test_real_models_are_balanced_within_their_largest_operations(model, stages):
    graph = captured(model, 2).graph
    costs = analytic(graph)
    total = sum(costs.forward_s) + sum(costs.backward_s)
    largest = max(f + b for f, b in zip(costs.forward_s, costs.backward_s, strict=True))
    problem = GraphProblem(graph=graph, costs=costs, stages=stages, micro_batches=64)
    for method in (autopipe, layer_assignment):
        found = method.choose_stages(problem)
        cut(graph, found)
        times = [
            sum(costs.forward_s[slice(*stage.operations[0])]) + sum(costs.backward_s[slice(*stage.operations[0])])
            for stage in found
        ]
        assert max(times) <= total / stages + largest


def test_a_model_that_no_device_holds_is_refused():
    graph = captured("gpt2", 2).graph
    with pytest.raises(PartitionError, match=r"2 stages do not fit devices of 0.0 GiB; more stages"):
        autopipe.choose_stages(GraphProblem(graph=graph, costs=analytic(graph, memory_bytes=1e5), stages=2))
    with pytest.raises(PartitionError, match=r"operations of the model cost anything"):
        autopipe.choose_stages(GraphProblem(graph=graph, costs=analytic(graph), stages=1000))
