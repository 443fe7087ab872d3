"""The table of partition methods: ``METHODS`` is the only place that knows them by name.

`auto3d partition`, the axis `partition` of a search and the makers of plans all read it. A method is a file of this
folder and a line here. The file defines one function:

- ``choose_stages(problem: StageProblem) -> tuple[StagePlan, ...]``, if the method takes the number of stages;
- ``choose_partition(request: PartitionRequest) -> Partition``, if the method chooses the number of stages itself.
"""

from collections.abc import Callable
from dataclasses import dataclass
from difflib import get_close_matches
from functools import cached_property
from importlib import import_module

from auto3d.errors import InputError
from auto3d.partition.problem import StageProblem
from auto3d.partition.request import Partition, PartitionRequest
from auto3d.plan import StagePlan


@dataclass(frozen=True)
class PartitionMethod:
    """One partition method. Its file is imported at first use, since some methods need numpy, which is slow to load."""

    file: str  # name of the file in this folder, or of a package
    chooses_stages: bool = False  # the method finds the number of stages itself
    searched: bool = True  # a search over all methods tries it; False: it only describes another system
    balances_time: bool = False  # its stages depend on StageProblem.before, so on what each stage recomputes
    cuts_in_turns: bool = False  # quick enough to cut again for what stages keep of each plan that a search looks at
    fits_memory: bool = False  # the method respects StageProblem.earliest, the memory limit of the devices
    rival: str = ""  # method whose stages a search takes instead where stages recompute and it predicts less time

    @cached_property
    def choose_stages(self) -> Callable[[StageProblem], tuple[StagePlan, ...]]:
        """The function of a method that takes the number of stages."""
        return import_module(f"{__name__}.{self.file}").choose_stages

    @cached_property
    def choose_partition(self) -> Callable[[PartitionRequest], Partition]:
        """The function of a method that chooses the number of stages itself."""
        return import_module(f"{__name__}.{self.file}").choose_partition


METHODS: dict[str, PartitionMethod] = {  # in the order of the search axis, which decides which plans a seed draws
    "uniform": PartitionMethod("uniform"),
    "blocks": PartitionMethod("blocks"),
    "layer-assignment": PartitionMethod("layer_assignment", balances_time=True),
    "autopipe": PartitionMethod("autopipe", balances_time=True, cuts_in_turns=True, fits_memory=True, rival="blocks"),
    "rannc": PartitionMethod("rannc", chooses_stages=True),
    "weight-shares": PartitionMethod("weight_shares", searched=False),
    "autopipe-planner": PartitionMethod("autopipe_planner", searched=False),
}
STAGE_METHODS = tuple(name for name, method in METHODS.items() if not method.chooses_stages)
"""Names of the methods that take the number of stages: the values of the search axis."""

SEARCHED_METHODS = tuple(name for name in STAGE_METHODS if METHODS[name].searched)
"""The values of the search axis that stand for all of them."""


def method_named(name: str, names: tuple[str, ...] = tuple(METHODS), *, key: str = "method") -> PartitionMethod:
    """The method called ``name``, one of ``names``; raises InputError, which blames ``key``, where there is none."""
    if name not in names:
        near = get_close_matches(name, names, n=1)
        hint = f"; did you mean {near[0]}?" if near else ""
        raise InputError(f"{key}: {name!r} is not known; there are {', '.join(names)}{hint}")
    return METHODS[name]
