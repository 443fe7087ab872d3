"""Links that messages between stages share, worked by hand: directions of a link are independent."""

import pytest

from auto3d.cluster import Cluster, Link, Node
from auto3d.cost.collectives import AmpTraffic, Traffic
from auto3d.cost.placed import PlacedTraffic
from auto3d.mesh import PIPELINE, REPLICA, TENSOR, Mesh

INSIDE, OUTSIDE = Link(latency_s=1e-6, bandwidth=80.0, lanes=1), Link(latency_s=1e-3, bandwidth=8.0, lanes=1)


def placed(devices: int, nodes: int, *ranks: tuple[int, ...], homes=None, traffic=Traffic, **axes: int):
    """The traffic of stages on ``ranks`` on equal nodes of ``devices``, with and without alternating passes."""

    def both(alternates: bool) -> PlacedTraffic:
        cluster = Cluster(nodes=(Node(devices=devices, inside=INSIDE, outside=OUTSIDE),) * nodes, device="cuda")
        pipelines, tp = axes.get("pipelines", 1), axes.get("tp", 1)
        sizes = [((PIPELINE, pipelines), (REPLICA, len(one) // (pipelines * tp)), (TENSOR, tp)) for one in ranks]
        meshes = [Mesh(size, one) for size, one in zip(sizes, ranks, strict=True)]
        stages = homes or tuple((number,) for number in range(len(ranks)))
        return PlacedTraffic(cluster, meshes, stages, traffic, alternates=alternates)

    return both


def bandwidths(traffic: PlacedTraffic, *pairs: tuple[int, int]) -> list[float]:
    return [route.link.bandwidth for source, target in pairs for route in traffic.routes(source, target, 0)]


@pytest.mark.parametrize(("alternates", "shared"), [(False, 1), (True, 2)])
def test_activations_and_gradients_share_a_link_only_where_they_alternate(alternates: bool, shared: int):
    """Three nodes of a stage each: activations enter the middle node by one direction of its link and leave by the
    other. Gradients that travel meanwhile leave it by the same direction as its activations."""
    chain = placed(1, 3, (0,), (1,), (2,))(alternates)
    assert bandwidths(chain, (0, 1), (1, 2)) == [8 / shared, 8 / shared]


def test_messages_of_one_direction_share_a_link():
    """Two pipelines through two nodes: both their messages leave the first node, whether or not passes alternate."""
    for alternates in (False, True):
        both = placed(2, 2, (0, 1), (2, 3), pipelines=2)(alternates)
        assert bandwidths(both, (0, 1)) == [4.0]
        tensor = placed(2, 2, (0, 1), (2, 3), tp=2)(alternates)
        assert bandwidths(tensor, (0, 1)) == [4.0]


def test_a_lane_inside_a_node_carries_each_direction_that_is_in_use():
    """Four stages in a node of one lane: three messages of activations, and as many of gradients."""
    four = placed(4, 1, (0,), (1,), (2,), (3,))
    assert bandwidths(four(False), (0, 1)) == [pytest.approx(80 / 3)]
    assert bandwidths(four(True), (0, 1)) == [pytest.approx(80 / 6)]


def test_a_rank_sends_to_the_replicas_of_a_stage_one_after_the_other():
    """One rank sends to two replicas in another node: a single message at a time leaves, two wait to enter."""
    assert bandwidths(placed(2, 2, (0,), (2, 3))(False), (0, 1)) == [4.0, 4.0]
    two_nodes = placed(2, 3, (0,), (2, 4))(False)
    assert bandwidths(two_nodes, (0, 1)) == [8.0, 8.0]
    assert two_nodes.crosses


def test_the_last_stage_of_a_loop_sends_to_the_first_device():
    """Two chunks on each of two devices: what returns to the first node uses the other direction, or the same as
    gradients."""
    loop = placed(1, 2, (0,), (1,), homes=((0,), (1,), (0,), (1,)))
    assert bandwidths(loop(False), (0, 1), (1, 0)) == [8.0, 8.0]
    assert bandwidths(loop(True), (0, 1), (1, 0)) == [8.0, 8.0], "one after the other on the way from 0 to 1"


def test_amp_shares_no_link():
    chain = placed(1, 3, (0,), (1,), (2,), traffic=AmpTraffic)(True)
    assert bandwidths(chain, (0, 1), (1, 2)) == [8.0, 8.0]
