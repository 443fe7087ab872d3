"""Cost models without the figures that were fitted to a set: the honest error on it."""

from collections.abc import Callable
from dataclasses import replace

from auto3d.cluster import Accelerator
from auto3d.cost.model import CostModel
from auto3d.cost.system_times import DEEPSPEED_TIMES, HOST, NANOTRON_TIMES, SystemTimes

# Products as an H100 ran them alone (results/cuda), in proportion to the peak, and the round figure of traffic.
MATRIX_EFFICIENCY, HALF_SECONDS, MEMORY_EFFICIENCY = 0.79, 4e9 / 989e12, 0.8


def _products(kind: Accelerator) -> Accelerator:
    return replace(
        kind,
        matrix_efficiency=MATRIX_EFFICIENCY,
        half_flops=HALF_SECONDS * kind.peak_flops,
        memory_efficiency=MEMORY_EFFICIENCY,
    )


def _host(times: SystemTimes) -> Callable[[Accelerator], Accelerator]:
    """The host of another system, which was fitted to another set."""
    known = {name: getattr(times, name) for name in HOST}
    unknown = Accelerator()
    host = {name: getattr(unknown, name) if value is None else value for name, value in known.items()}
    return lambda kind: replace(kind, **host)


_CHANGES: dict[str, tuple[Callable[[Accelerator], Accelerator], ...]] = {
    "a100-node": (_products, _host(NANOTRON_TIMES)),
    "h100-llama": (_products, _host(DEEPSPEED_TIMES)),
    "h100-gpt2": (_host(DEEPSPEED_TIMES), lambda kind: replace(kind, micro_batch_s=0.0)),  # no pipeline engine
    "b200-llama70b": (_products,),
    "v100-megatron": (_products,),
}
"""Set -> what replaces the figures that were fitted to times of its runs. To others none was."""


CHANGED = frozenset(_CHANGES)  # sets whose predictions these changes make others


def without(name: str) -> Callable[[CostModel], CostModel]:
    """Makes a cost model one that takes no figure from the times of the set ``name``."""

    def changed(model: CostModel) -> CostModel:
        nodes = model.cluster.nodes
        for change in _CHANGES.get(name, ()):
            nodes = tuple(replace(node, accelerator=change(node.accelerator)) for node in nodes)
        return model.on(replace(model.cluster, nodes=nodes)) if name in _CHANGES else model

    return changed
