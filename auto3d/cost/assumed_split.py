"""The work of one tensor-parallel rank if each subgraph is split as Megatron-LM splits a block."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

import numpy as np

from auto3d.capture.graph import Graph
from auto3d.cost.work import ELEMENT_BYTES, PRECISION_BYTES, Exchange, Work
from auto3d.tensor.conversions import Collective


def work_of_assumed_split(graph: Graph, bounds: Sequence[int], work: Work, tp: int, *, precision: str) -> Work:
    """``work`` of ``graph``, whose subgraphs lie between ``bounds``, on one of ``tp`` ranks.

    Each subgraph is split from its first product with weights, by columns, to its last, by rows (AMP, section 3.2). The
    forward has one all-reduce after the last product, the backward one before the first. The last subgraph and
    embedding look-ups are split by the vocabulary.
    """
    sizes = {value.name: value.bytes for node in graph.nodes for value in node.outputs}
    sizes |= {name: value.bytes for group in (graph.inputs, graph.parameters) for name, value in group.items()}
    scale = PRECISION_BYTES[precision] / ELEMENT_BYTES
    split = np.zeros(len(work), dtype=bool)
    exchanges: list[Exchange] = []

    def exchange(position: int, *, before: bool, size: float) -> None:
        one = Exchange(
            collective=Collective.ALL_REDUCE, position=position, before=before, forward=not before, size=size
        )
        exchanges.append(one)

    for first, last in pairwise(bounds):
        products = [p for p in range(first, last) if work.flops[p] and set(graph.nodes[p].state) & graph.trained]
        for position in range(first, last):
            node = graph.nodes[position]
            if node.operator.startswith("aten.embedding") and work.moved[position]:
                largest = max((sizes[name] for name in node.state if name in graph.parameters), default=0)
                split[position] = largest > 2 * sum(value.bytes for value in node.outputs)
                if split[position]:
                    exchange(position, before=False, size=work.moved[position] / 2)
        if not products:
            continue
        end = last - 1 if last == bounds[-1] else products[-1]
        split[products[0] : end + 1] = True
        read = scale * sum(sizes[name] for name in graph.nodes[products[0]].reads)
        exchange(products[0], before=True, size=read)
        if last != bounds[-1]:
            made = scale * sum(value.bytes for value in graph.nodes[end].outputs)
            exchange(end, before=False, size=made)
    fraction = np.where(split, 1 / tp, 1.0)
    divided = (
        "flops",
        "backward_flops",
        "weight_flops",
        "moved",
        "backward_moved",
        "parameters",
        "saved",
        "deferred",
        "fixed",
        "working",
    )
    return replace(
        work,
        **{name: fraction * getattr(work, name) for name in divided},
        softmaxes=work.softmaxes // tp,
        tied=tuple((elements * fraction[users[0]], users) for elements, users in work.tied),
        shards=tp,
        exchanges=tuple(sorted(exchanges, key=lambda one: one.boundary)),
    )
