"""AMP's search as in its paper (Li et al. 2022, sections 4.1 and 4.4, algorithm 1): its space, and its annealing.

The space has four axes: the degrees, the micro-batch size, the two tilings of the device mesh, and stages by
``pipe_dp`` (layer-assignment). Each move draws the tensor- or the data-parallel degree anew, then the micro-batch size
and the tiling. ``annealing`` is our version of it, over all axes. Where the listing has errors or gaps:

- Lines 8 and 18 use ``randn()``, a normal variate; here it is uniform from 0 to 1.
- Line 15 cuts stages for the strategy before the move; here stages are cut for the strategy after it.
- ``cool_down`` is not given; here the temperature falls from 1 second, linearly to 0 or by a factor in each step.
- The first strategy is never recorded; here it is.
"""

from collections import defaultdict
from dataclasses import replace
from math import inf
from random import Random
from typing import Any

from auto3d.cluster import Cluster
from auto3d.search.algorithms.annealing import accepted_s
from auto3d.search.algorithms.random_search import with_random_choices
from auto3d.search.axes import EQUAL, Candidate, divisors_of
from auto3d.search.recompute import AUTO
from auto3d.search.search import Search
from auto3d.search.space import SearchSpace

TILINGS = ("horizontal", "vertical")


def amp_space(space: SearchSpace, cluster: Cluster) -> SearchSpace:
    """AMP's axes; the axes that AMP does not have keep the values of ``space``.

    Degrees and micro-batch sizes that ``space`` lists stay. Where it has "auto", tensor-parallel groups may be of any
    size that divides the cluster, and cross nodes.
    """
    changes: dict[str, Any] = {
        "tp": divisors_of(cluster.devices) if space.tp == AUTO else space.tp,
        "schedule": ("1f1b",),
        "partition": ("layer-assignment",),
        "placement": TILINGS,
        "replicas": (EQUAL,),
    }
    return replace(space, **changes, allow_idle_devices=False)


def amp(search: Search, seed: int) -> None:
    """Algorithm 1 for as many iterations as the budget has candidates; it needs a domain of ``amp_space``."""
    random = Random(seed)
    by_degree: dict[str, defaultdict[int, list[Candidate]]] = {"tp": defaultdict(list), "dp": defaultdict(list)}
    for degrees in search.domain.degrees:
        for name, of_degree in by_degree.items():
            of_degree[getattr(degrees, name)].append(degrees)
    present: Candidate | None = None
    cost = inf
    iterations = search.budget.candidates
    for iteration in range(iterations):
        if search.spent:
            break
        degrees = random.choice(search.domain.degrees)
        if present is not None:
            kept, other = ("dp", "tp") if random.random() > 0.5 else ("tp", "dp")
            near = by_degree[kept][getattr(present, kept)]
            degree = random.choice(sorted({getattr(neighbour, other) for neighbour in near}))
            degrees = random.choice([neighbour for neighbour in near if getattr(neighbour, other) == degree])
        candidate = with_random_choices(degrees, search.domain, random)
        cooling = search.options.amp_cooling
        temperature_s = 1 - iteration / iterations if cooling is None else cooling**iteration
        seconds = accepted_s(search, candidate, random, present_s=cost, temperature_s=temperature_s)
        if seconds is not None:
            present, cost = candidate, seconds
