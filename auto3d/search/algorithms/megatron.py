"""The three heuristics of Megatron-LM, as AMP states them (Li et al. 2022, section 5; Narayanan et al. 2021)."""

from dataclasses import replace
from math import inf

from auto3d.search.axes import EQUAL
from auto3d.search.placement import MEGATRON
from auto3d.search.search import Search


def megatron(search: Search, seed: int) -> None:
    """For each micro-batch size, the candidate of the smallest tp × pp that holds the model.

    tp is at most the number of devices of the smallest node; of equal products, the product with the largest tp is
    taken. The rest is Megatron-LM's: equally many blocks in each stage, 1F1B, and its order of ranks. ``seed`` has no
    effect.
    """
    domain = search.domain
    allowed = [
        combination
        for combination in domain.degrees
        if combination.tp <= domain.cluster.devices_per_node and combination.replicas == EQUAL
    ]
    for size in sorted({combination.micro_batch_size for combination in allowed}):
        smallest_first = sorted(
            (combination for combination in allowed if combination.micro_batch_size == size),
            key=lambda combination: (combination.tp * combination.pp, -combination.tp, -combination.dp),
        )
        for recompute in domain.choices["recompute"]:
            for degrees in smallest_first:
                candidate = replace(
                    degrees, schedule="1f1b", partition="blocks", placement=MEGATRON, recompute=recompute
                )
                if search.bound(candidate) < inf:
                    search.seconds(candidate)
                    break
