"""The three heuristics of Megatron-LM, as AMP states them (Li et al. 2022, section 5; Narayanan et al. 2021)."""

from dataclasses import replace
from math import inf

from auto3d.search.axes import EQUAL
from auto3d.search.placement import MEGATRON
from auto3d.search.search import Search


def megatron(search: Search, seed: int) -> None:
    """For each micro-batch size, the candidate of the smallest tp × pp that holds the model.

    tp is at most the number of devices of the smallest node; of equal products, the one with the largest tp is taken.
    The rest is Megatron-LM's: equally many blocks in each stage, 1F1B, and its order of ranks. ``seed`` has no effect.
    """
    domain = search.domain
    allowed = [one for one in domain.degrees if one.tp <= domain.cluster.devices_per_node and one.replicas == EQUAL]
    for size in sorted({one.micro_batch_size for one in allowed}):
        smallest_first = sorted(
            (one for one in allowed if one.micro_batch_size == size),
            key=lambda one: (one.tp * one.pp, -one.tp, -one.dp),
        )
        for recompute in domain.choices["recompute"]:
            for degrees in smallest_first:
                candidate = replace(
                    degrees, schedule="1f1b", partition="blocks", placement=MEGATRON, recompute=recompute
                )
                if search.bound(candidate) < inf:
                    search.seconds(candidate)
                    break
