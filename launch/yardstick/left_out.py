"""Cost models without the figures that were fitted to a set: the honest error on it."""

from collections.abc import Callable
from dataclasses import replace

from auto3d.cluster import Accelerator
from auto3d.cost.model import CostModel
from auto3d.cost.system_times import DEEPSPEED_TIMES

LEFT_OUT = "auto3d-left-out"  # the predictor by these cost models
# Products as an H100 ran them alone (results/cuda), in proportion to the peak, and the round figure of traffic.
MATRIX_EFFICIENCY, HALF_SECONDS, MEMORY_EFFICIENCY = 0.79, 4e9 / 989e12, 0.8


def _products(kind: Accelerator) -> Accelerator:
    return replace(
        kind,
        matrix_efficiency=MATRIX_EFFICIENCY,
        half_flops=HALF_SECONDS * kind.peak_flops,
        memory_efficiency=MEMORY_EFFICIENCY,
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
    """Makes a cost model one that takes no figure from the times of the set ``name``."""

    def changed(model: CostModel) -> CostModel:
        nodes = model.cluster.nodes
        for change in _CHANGES.get(name, ()):
            nodes = tuple(replace(node, accelerator=change(node.accelerator)) for node in nodes)
        return model.on(replace(model.cluster, nodes=nodes)) if name in _CHANGES else model

    return changed
