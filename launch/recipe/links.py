"""The links whose figures a recipe leaves out: the usual links of the accelerators of its nodes."""

from collections.abc import Callable
from dataclasses import dataclass, replace

from launch.recipe.cluster_schema import AcceleratorRecipe, ClusterRecipe, LinkRecipe

ROUND = LinkRecipe(gbit_per_s=100.0, latency_us=20.0)  # links of nodes of which nothing is known
SIDES = ("inside", "outside")


@dataclass(frozen=True, kw_only=True)
class AssumedLink:
    """A link with figures that the recipe leaves out: what stands in for each (None: the recipe has its own)."""

    kind: int  # number of the kind of nodes: 0 is the cluster itself, n is cluster.more[n - 1]
    side: str  # one of SIDES
    gbit_per_s: float | None
    lanes: int | None  # lanes of gbit_per_s; None: a lane per device, or the recipe's own
    latency_us: float | None
    accelerator: str  # the accelerator whose usual link this is; empty: the figures are round

    @property
    def key(self) -> str:
        """The key that sets the figures."""
        link = f"{f'cluster.more[{self.kind - 1}]' if self.kind else 'cluster'}.{self.side}"
        if self.latency_us is None:
            return f"{link}.gbit_per_s"
        return f"{link}.latency_us" if self.gbit_per_s is None else link


def complete_links(
    cluster: ClusterRecipe, accelerator_of: Callable[[int, str], AcceleratorRecipe]
) -> tuple[AssumedLink, ...]:
    """Fill in the figures that ``cluster`` lacks, and return them.

    ``accelerator_of`` maps the number of a kind of nodes and the name of its accelerator to the accelerator. Nodes
    without an accelerator, and processes on CPUs, which do not use an accelerator's links, get round figures.
    """
    assumed = []
    for number, kind in enumerate((cluster, *cluster.more)):
        for side in SIDES:
            given: LinkRecipe | None = getattr(kind, side)
            if given is None or None not in (given.gbit_per_s, given.latency_us):
                continue
            usual, name = None, kind.accelerator if cluster.device != "cpu" else None
            if name is not None:
                usual = getattr(accelerator_of(number, name), side)
            link = _completed(given, usual or ROUND)
            setattr(kind, side, link)
            assumed.append(
                AssumedLink(
                    kind=number,
                    side=side,
                    gbit_per_s=link.gbit_per_s if given.gbit_per_s is None else None,
                    lanes=link.lanes if given.lanes is None else None,
                    latency_us=link.latency_us if given.latency_us is None else None,
                    accelerator=(name or "") if usual else "",
                )
            )
    return tuple(assumed)


def _completed(given: LinkRecipe, usual: LinkRecipe) -> LinkRecipe:
    """``given`` with the figures of ``usual`` that it lacks; lanes belong to the bandwidth of either."""
    latency_us = usual.latency_us if given.latency_us is None else given.latency_us
    if given.gbit_per_s is not None:
        return replace(given, latency_us=latency_us)
    lanes = usual.lanes if given.lanes is None else given.lanes
    return LinkRecipe(gbit_per_s=usual.gbit_per_s, latency_us=latency_us, lanes=lanes)
