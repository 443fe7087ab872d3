"""What RaNNC chooses, as a Plan: it runs, or is refused where its ranks would refuse it."""

import random
from dataclasses import replace
from functools import cache
from math import inf

import pytest

from auto3d.capture.interpolate import interpolate
from auto3d.errors import InputError
from auto3d.partition import PartitionRequest, partition
from auto3d.partition.cost import analytic
from auto3d.partition.methods.rannc import rannc
from auto3d.partition.stage import PartitionError
from auto3d.plan import Plan
from auto3d.runtime.rank import check_plan
from auto3d.search.partitioned import check_runs, plan_of
from tests.distributed.parity import SGD
from tests.models import captured
from tests.runtime.test_layout import SETTINGS
from tests.soak import soak

MACHINES = [(1, 2), (1, 3), (1, 4), (2, 2), (1, 5), (1, 6), (2, 3)]  # nodes, devices of each


def problem_of(model: str, plan: Plan, *, as_ranks: bool) -> str:
    """Why ``plan`` does not run, by the Graphs alone or by the layout of the ranks; empty if it does."""
    base = captured(model, 2)
    try:
        if as_ranks:
            check_plan(base.at(plan.micro_batch_size), plan, replace(SETTINGS, optimizer=SGD))
        else:
            check_runs(plan, lambda samples: base.at(samples).graph)
    except InputError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("model", "refused"),
    [
        ("reused", False),
        ("averaging", True),  # its running average enters the loss: replicas of it would differ
        ("residual", True),  # its batch statistics need 2 samples: a replica must not run one alone
        *soak(("gpt2", False), ("t5", False), ("swin", False), ("straight-through", False)),
    ],
)
def test_what_rannc_chooses_runs_or_is_refused_as_ranks_refuse_it(model, refused):
    chance = random.Random(4)
    base = captured(model, 2)
    graph_at = cache(lambda samples: interpolate(base.graph, base.at(3).graph, samples))
    alone = {"nodes": 1, "devices_per_node": 1, "global_batch": 8, "smallest_micro_batch": 2}
    (whole,) = rannc(graph_at, lambda samples: analytic(graph_at(samples)), **alone).memory_bytes
    seen: dict[str, int] = {}
    for _ in range(8):
        nodes, per_node = chance.choice(MACHINES)
        memory = chance.choice([inf, 0.9, 0.6, 0.45, 0.35]) * whole
        request = PartitionRequest(
            graph_at=lambda samples: base.at(samples).graph,
            costs_of=lambda graph, memory=memory: analytic(graph, memory_bytes=memory),
            stages=None,
            micro_batch_size=2,
            global_batch=chance.choice([6, 8, 12]),
            nodes=nodes,
            devices_per_node=per_node,
            equal_slices=chance.random() < 0.5,
        )
        try:
            found = partition("rannc", request)
        except PartitionError:
            continue
        slices = [found.micro_batches * replicas for replicas in found.replicas]
        divides = not any(request.global_batch % count for count in slices)
        assert divides or not request.equal_slices
        try:
            plan = plan_of(found, request, seed=1)
        except InputError:
            assert not divides
            continue
        by_graphs, by_ranks = (problem_of(model, plan, as_ranks=as_ranks) for as_ranks in (False, True))
        assert bool(by_graphs) == bool(by_ranks), (by_graphs, by_ranks)
        assert divides or by_graphs
        if divides:
            seen[by_graphs] = seen.get(by_graphs, 0) + 1
    assert any(seen) == refused, seen
    assert sum(seen.values()) > 2
