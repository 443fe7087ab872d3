"""The derivation finds the least cost: against brute force over all ways and all conversions of small random programs.

The brute force takes the ways of each operation and the cost of each conversion from the derivation, but not its
search: it decides one operation after the other, and converts each value anew for all that need it.
"""

from collections.abc import Iterator
from itertools import pairwise

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn

from auto3d.capture.export import InputSpec
from auto3d.capture.model import CapturedModel, capture
from auto3d.derived.shards import tensor_parallel
from auto3d.share import Share
from auto3d.tensor.derivation import Derivation
from auto3d.tensor.derive import _Search
from auto3d.tensor_placement import COPIED, WHOLE, TensorPlacement

SAMPLES, WIDTH = 2, 64  # equally many positions and features: every value can be transposed
MANY = 10**6  # states of the search, so that it drops none for want of room
Step = tuple[str, int, int]  # (operator, numbers of its operands among the values, counted from the last)
OPERATORS = ("linear", "linear", "add", "mul", "gelu", "view", "transpose", "softmax", "sum")


class Program(nn.Module):
    """Applies the operators of ``steps`` to a product and to one another's results; the loss is a mean."""

    def __init__(self, steps: list[Step]) -> None:
        super().__init__()
        self._steps = steps
        self.first = nn.Linear(WIDTH, WIDTH)
        self.linears = nn.ModuleList(
            nn.Linear(size, size) for size in self._run(torch.empty(SAMPLES, WIDTH, WIDTH, device="meta"), None)[1]
        )

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        return self._run(self.first(features), iter(self.linears))[0].mean()

    def _run(self, value: torch.Tensor, linears: Iterator[nn.Module] | None) -> tuple[torch.Tensor, list[int]]:
        values, sizes = [value], []
        for operator, first, second in self._steps:
            one, other = values[-1 - first % len(values)], values[-1 - second % len(values)]
            if operator == "linear":
                sizes.append(one.shape[-1])
                values.append(one if linears is None else next(linears)(one))
            elif operator == "view":
                flat = one.dim() == 4
                values.append(one.flatten(2) if flat else one.unflatten(2, (4, -1)))
            elif operator in ("add", "mul") and one.dim() == other.dim() and one.shape[2:] == other.shape[2:]:
                values.append(getattr(torch, operator)(one, other))
            elif operator == "transpose":
                values.append(one.mT if one.dim() == 3 else one.transpose(1, 2).reshape(SAMPLES, WIDTH, 4, -1))
            elif operator == "softmax":
                values.append(one.softmax(-1))
            elif operator == "sum":
                values.append(one + one.sum(1, keepdim=True))
            else:
                values.append(nn.functional.gelu(one))
        return values[-1], sizes


steps = st.lists(st.tuples(st.sampled_from(OPERATORS), st.integers(0, 2), st.integers(0, 3)), min_size=2, max_size=7)


@given(steps, st.sampled_from([2, 4]), st.booleans())
@settings(max_examples=10, suppress_health_check=list(HealthCheck))
def test_the_derivation_finds_the_least_cost(steps, shards, sequence_parallel):
    captured = capture(
        lambda: Program(steps), {"features": InputSpec(shape=(WIDTH, WIDTH), dtype=torch.float32)}, SAMPLES
    )
    search, derivation = derived(captured, shards, sequence_parallel)
    least = BruteForce(captured, search).least(derivation.cost * (1 + 1e-9) + 1e-3)
    assert least == pytest.approx(derivation.cost, abs=1e-3)


def derived(captured: CapturedModel, shards: int, sequence_parallel: bool) -> tuple[_Search, Derivation]:
    with pytest.MonkeyPatch.context() as patch:
        found = []
        run = _Search.run

        def recorded(search: _Search, _: int) -> Derivation:
            found.append((search, run(search, MANY)))
            return found[-1][1]

        patch.setattr(_Search, "run", recorded)
        tensor_parallel(captured, Share(tp=shards, sequence_parallel=sequence_parallel))
    return found[0]


class BruteForce:
    def __init__(self, captured: CapturedModel, search: _Search) -> None:
        self._search = search
        self._operations = search._operations
        self._loss = next(node for node in captured.exported.program.nodes if node.name == captured.exported.loss)
        self._found: dict[tuple, float] = {}

    def least(self, most: float) -> float:
        """The least cost of all; infinite if it is above ``most``."""
        self._best = most
        self._reached = False
        self._decide(0, 0.0, {}, {})
        return self._best if self._reached else float("inf")

    def _decide(self, number: int, ways_cost: float, made: dict, needs: dict) -> None:
        """``made``: value -> its placement; ``needs``: value -> [(how it is operand, the placement it needs)]."""
        total = ways_cost + sum(self._converted(node, made.get(node), tuple(each)) for node, each in needs.items())
        if total > self._best:
            return
        if number == len(self._operations):
            self._best, self._reached = total, True
            return
        operation = self._operations[number]
        for way in operation.ways:
            later = {node: list(each) for node, each in needs.items()}
            for node, need in zip(operation.call.operands, way.needs, strict=True):
                later.setdefault(node, []).append((self._search._operand(node, operation), need))
            given = {node: way.gives[operation.call.number_of(node)] for node in operation.call.result_nodes}
            if self._loss in given:
                later[self._loss] = [(self._search._operand(self._loss), WHOLE)]
            self._decide(number + 1, ways_cost + self._search.costs.of_way(operation, way), made | given, later)

    def _converted(self, node: object, made: TensorPlacement | None, needs: tuple) -> float:
        """The least cost of conversions after which a value has all placements that it needs, in this order."""
        key = node, made, needs
        if key not in self._found:
            self._found[key] = min(
                (cost + self._chains(frozenset({first}), needs) for first, cost in self._first(made, needs)),
                default=float("inf"),
            )
        return self._found[key]

    def _first(self, made: TensorPlacement | None, needs: tuple) -> list[tuple[TensorPlacement, float]]:
        """The placements that a value may have at first, with their cost; state is placed as its first use needs it."""
        operand, need = needs[0]
        if not operand.is_state:
            return [(made or WHOLE, 0.0)]
        if need.split is not None:
            return [(need, 0.0)]
        copied = [(COPIED, self._search.costs.of_copied_state(operand))] if need == COPIED else []
        return [(WHOLE, 0.0), *copied]

    def _chains(self, available: frozenset, needs: tuple) -> float:
        if not needs:
            return 0.0
        (operand, need), *later = needs
        if need in available or (need == COPIED and WHOLE in available and not operand.gradient):
            return self._chains(available, tuple(later))
        if operand.is_written or (operand.is_weight and need.split is not None):
            return float("inf")
        costs = [float("inf")]
        for source in available:
            if source.split is not None and operand.is_state:
                continue
            for chain in ((source, need), (source, WHOLE, need), (source, COPIED, need)):
                steps = [self._search.costs.of_conversion(operand, *step) for step in pairwise(chain)]
                if len(set(chain)) == len(chain) and None not in steps:
                    costs.append(sum(steps) + self._chains(available.union(chain), tuple(later)))
        return min(costs)
