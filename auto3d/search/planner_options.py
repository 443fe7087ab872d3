"""Options of the papers' planners among the search algorithms."""

from dataclasses import dataclass

from auto3d.partition.request import BLOCKS


@dataclass(frozen=True, kw_only=True)
class PlannerOptions:
    """What the papers of RaNNC and AMP leave open, or set for their experiments alone."""

    rannc_blocks: int = BLOCKS  # k, the number of blocks of which RaNNC makes stages
    rannc_smallest_micro_batch: int = 1  # samples
    amp_cooling: float | None = None  # factor of the temperature in each step; None: it falls linearly to 0
