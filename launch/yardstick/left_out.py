"""Cost models without the figures that were fitted to a set: the honest error on it."""

from collections.abc import Callable
from dataclasses import replace
from statistics import geometric_mean

from auto3d.cluster import Accelerator
from auto3d.cost.model import CostModel
from auto3d.cost.system_times import DEEPSPEED_TIMES

LEFT_OUT = "auto3d-left-out"  # the predictor by these cost models
ITERATIONS = {
    "A100": (0.8, 13.2e9 / 312e12),
    "B200": (0.547, 45e9 / 2250e12),
    "H100": (0.528, 8.16e9 / 989e12),
    "V100": (0.58, 0.25e9 / 125e12),
}
"""Family -> matrix_efficiency, and half_flops over the peak, of the file in recipes/accelerators/ whose figures in 16
bits were fitted to whole iterations: A100-80GB, B200-180GB (whose half_flops is round), H100-80GB-nanotron, V100-16GB.
Products that a device runs alone reach more of its peak: 0.79 on an H100 (results/cuda)."""
MEMORY_EFFICIENCY = 0.8  # the round figure of traffic


def _products(kind: Accelerator) -> Accelerator:
    """``kind`` with the products of the other families' iterations: the geometric means of their figures."""
    others = [figures for family, figures in ITERATIONS.items() if not kind.name.startswith(family)]
    matrix, half = map(geometric_mean, zip(*others, strict=True))
    return replace(
        kind, matrix_efficiency=matrix, half_flops=half * kind.peak_flops, memory_efficiency=MEMORY_EFFICIENCY
    )


def _launches(kind: Accelerator) -> Accelerator:
    """Launches from Python as fitted to DeepSpeed on A100."""
    assert DEEPSPEED_TIMES.launch_s is not None
    return replace(kind, launch_s=DEEPSPEED_TIMES.launch_s)


_CHANGES: dict[str, tuple[Callable[[Accelerator], Accelerator], ...]] = {
    "h100-gpt2": (_launches,),
    "b200-llama70b": (_products,),
    "v100-megatron": (_products,),
}
"""Set -> what replaces the figures that were fitted to times of its runs. To others none was, except that a100-node is
cross-validated in folds and h100-llama has a model of its own that nothing was fitted to."""


CHANGED = frozenset(_CHANGES)  # sets whose predictions these changes make others


def without(name: str) -> Callable[[CostModel], CostModel]:
    """Changes a cost model so that it takes no figure from the times of the set ``name``."""

    def changed(model: CostModel) -> CostModel:
        nodes = model.cluster.nodes
        for change in _CHANGES.get(name, ()):
            nodes = tuple(replace(node, accelerator=change(node.accelerator)) for node in nodes)
        return model.on(replace(model.cluster, nodes=nodes)) if name in _CHANGES else model

    return changed
