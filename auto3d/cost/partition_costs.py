"""Times and a cluster -> the costs that partition methods balance: in the precision of training, on one link."""

import numpy as np

from auto3d.cluster import Accelerator, Cluster, Link
from auto3d.cost.times import Times
from auto3d.cost.training_options import TrainingOptions
from auto3d.cost.work import ELEMENT_BYTES
from auto3d.partition.cost import PartitionCosts


def partition_costs(
    times: Times,
    accelerator: Accelerator,
    link: Link,
    training: TrainingOptions,
    *,
    memory_bytes: float,
    handling: tuple[float, float] = (0.0, 0.0),
) -> PartitionCosts:
    """The costs of operations with these ``times`` on ``accelerator``, whose messages travel over ``link``.

    ``memory_bytes`` is what a device has. ``handling`` is the compute of a message at each end: seconds, and seconds
    per byte.
    """
    weight = training.weight_bytes
    state = weight + training.sync_bytes + training.master_bytes + 4 * training.moments
    forward, forward_launch, backward, backward_launch, _ = (
        tuple(map(float, row)) for row in np.diff(times.table, axis=1)
    )
    return PartitionCosts(
        forward_s=forward,
        backward_s=backward,
        forward_launch_s=forward_launch,
        backward_launch_s=backward_launch,
        micro_batch_s=accelerator.micro_batch_s,
        latency_s=link.latency_s,
        bandwidth=link.bandwidth,
        handling=handling,
        memory_bytes=memory_bytes,
        state_factor=state / ELEMENT_BYTES,
        activation_factor=weight / ELEMENT_BYTES,
    )


def link_inside(cluster: Cluster) -> Link:
    """The link that RaNNC assumes for all messages: the slowest inside a node.

    "We use the intra-node bandwidth, not the inter-node bandwidth", since devices are allocated so that few messages
    leave a node (section III-B, footnote 3). If no node has two devices, every message leaves its node.
    """
    inside = [node.inside for node in cluster.nodes if node.devices > 1]
    outside = [node.outside for node in cluster.nodes if node.outside is not None and len(cluster.nodes) > 1]
    return min(inside or outside or [cluster.nodes[0].inside], key=lambda link: link.bandwidth)


def handling_inside(cluster: Cluster) -> tuple[float, float]:
    """The compute of a message inside a node at each end, on the node where it costs most: seconds, and per byte."""
    return max(node.handling for node in cluster.nodes)
