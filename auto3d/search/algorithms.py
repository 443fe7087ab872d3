"""Search space and costs -> ranked Plans. Each algorithm is one file; ``ALGORITHMS`` alone knows them by name."""

from collections.abc import Callable

from auto3d.search.annealing import annealing
from auto3d.search.exhaustive import exhaustive
from auto3d.search.megatron import megatron
from auto3d.search.random_search import random_search
from auto3d.search.rannc import rannc
from auto3d.search.search import Search

ALGORITHMS: dict[str, Callable[[Search, int], None]] = {  # the number is the seed
    "annealing": annealing,
    "random": random_search,
    "megatron": megatron,
    "exhaustive": exhaustive,
    "rannc": rannc,
}
