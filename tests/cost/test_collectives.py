"""Messages and collectives: the papers' equations against numbers worked by hand, and shared links."""

from collections import Counter
from itertools import product
from random import Random

import pytest

from auto3d.cluster import Accelerator, BusBandwidths, Cluster, ClusterError, Link, Node
from auto3d.conversions import Collective
from auto3d.cost.collectives import AmpTraffic, Traffic, amp_all_reduce_s, rabenseifner_all_reduce_s, ring_s, tree_s
from auto3d.cost.placed import PlacedTraffic
from auto3d.mesh import PIPELINE, REPLICA, TENSOR, Mesh
from auto3d.partition.stage import cut
from auto3d.resplit import pieces
from auto3d.runtime.messages.gradient_sync import holders
from auto3d.schedule import schedule_of
from tests.distributed.parity import make_plan
from tests.models import captured

LINK = Link(latency_s=0.5, bandwidth=10.0)


def two_nodes(lanes: int | None) -> Cluster:
    node = Node(
        devices=4,
        inside=Link(latency_s=0.0, bandwidth=100.0),
        outside=Link(latency_s=1.0, bandwidth=10.0, lanes=lanes),
    )
    return Cluster(nodes=(node, node), device="cuda")


def test_amp_equation_1():
    """Four workers, 80 bytes: 2 × 80 / 4 = 40 on each hop, at 10, 10, 20 and 40 bytes per second: 4 + 4 + 2 + 1."""
    assert amp_all_reduce_s([10, 10, 20, 40], 80) == pytest.approx(11)


def test_amp_counts_each_hop_of_a_ring_and_shares_no_link():
    """A node of two devices at 100 and two nodes of one, with links of 10, 20 and 5 bytes per second between them.

    The ring 0, 1, 2, 3 has hops of 100, 10, 5 and 5: 2 × 80 / 4 × (0.01 + 0.1 + 0.2 + 0.2) = 20.4 seconds.
    """
    inside = Link(latency_s=0.0, bandwidth=100.0)
    nodes = tuple(
        Node(devices=devices, inside=inside, outside=Link(latency_s=1.0, bandwidth=bandwidth, lanes=1))
        for devices, bandwidth in ((2, 10.0), (1, 20.0), (1, 5.0))
    )
    cluster = Cluster(nodes=nodes, device="cuda")
    groups = [(0, 1, 2, 3), (0, 2), (1, 3)]
    traffic = AmpTraffic(cluster, groups)
    assert traffic.seconds(Collective.ALL_REDUCE, groups[0], 80) == pytest.approx(20.4)
    assert traffic.group_link(groups[0]).seconds(Collective.ALL_GATHER, 80) == pytest.approx(10.2)
    assert traffic.message_s(0, 2, 100) == pytest.approx(1 + 10), "the link of node 0 is not shared"
    assert Traffic(cluster, groups).message_s(0, 2, 100) > 1 + 10


def test_ring_tree_and_rabenseifner():
    """80 bytes over 4: a ring passes 6 messages of 20, a tree 80 up and down in 2 levels each."""
    assert ring_s(4, 80, LINK) == pytest.approx(6 * 0.5 + 6 * 2)
    assert tree_s(4, 80, LINK) == pytest.approx(4 * 0.5 + 16)
    assert rabenseifner_all_reduce_s(4, 80, LINK) == pytest.approx(2 * 2 * 0.5 + 2 * 3 * 10 * 80 / (10 * 10 * 4))


def test_a_ring_of_many_ranks_is_slower_than_a_tree_where_latency_rules():
    cluster = Cluster(nodes=(Node(devices=64, inside=LINK),), device="cuda")
    traffic = Traffic(cluster, [range(64)])
    assert traffic.seconds(Collective.ALL_REDUCE, range(64), 1) == tree_s(64, 1, LINK) < ring_s(64, 1, LINK)
    assert traffic.seconds(Collective.ALL_REDUCE, range(64), 1e6) == ring_s(64, 1e6, LINK) < tree_s(64, 1e6, LINK)


@pytest.mark.parametrize(
    ("lanes", "groups", "bandwidth"),
    [
        (1, [(0, 4)], 10),  # a single group gets all of the only lane
        (1, [(0, 4), (1, 5)], 5),  # two groups share the lane
        (1, [(0, 1, 2, 3, 4, 5, 6, 7)], 10),  # one ring leaves the node once at a time
        (None, [(0, 4), (1, 5), (2, 6), (3, 7)], 10),  # each group has its own lane
        (None, [(0, 1, 2, 3, 4, 5, 6, 7)], 40),  # a ring on each of four lanes
        (2, [(0, 1, 4, 5), (2, 6), (3, 7)], 10),  # four devices share two lanes; this group has two of the four
        (2, [(0, 1), (4, 5)], 100),  # both groups stay inside their node
    ],
)
def test_groups_share_the_lanes_of_their_node(lanes: int | None, groups: list, bandwidth: float):
    assert Traffic(two_nodes(lanes), groups).link(groups[0]).bandwidth == pytest.approx(bandwidth)


def test_a_pair_of_nodes_talks_at_the_lower_of_their_figures():
    fast, slow = (Link(latency_s=0.0, bandwidth=bandwidth, lanes=1) for bandwidth in (50.0, 10.0))
    nodes = tuple(Node(devices=1, outside=link) for link in (fast, fast, slow))
    cluster = Cluster(nodes=nodes, device="cuda")
    assert Traffic(cluster, [(0, 1)]).message_s(0, 1, 100) == pytest.approx(2)
    assert Traffic(cluster, [(0, 2)]).message_s(0, 2, 100) == pytest.approx(10)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: Link(latency_s=0.0, bandwidth=0.0), "bandwidth is 0; it must be more than 0"),
        (lambda: Link(latency_s=-1.0, bandwidth=1.0), "latency_s is -1"),
        (lambda: Link(latency_s=0.0, bandwidth=1.0, lanes=0), "lanes is 0"),
        (lambda: Accelerator(peak_flops=float("nan")), "peak_flops is nan"),
        (lambda: Cluster(nodes=(Node(devices=1), Node(devices=1, outside=None)), device="cuda"), "node 1 has no link"),
    ],
)
def test_impossible_clusters_are_refused(make, words: str):
    with pytest.raises(ClusterError, match=words):
        make()


def measured_nodes(count: int) -> Cluster:
    """Nodes of four devices on which collectives of 800 bytes were measured; 16 ranks reach a third of one node's."""
    bus = BusBandwidths(size=800, nodes=(1, 4), all_reduce=(90.0, 30.0), all_gather=(60.0, 20.0))
    node = Node(
        devices=4,
        inside=Link(latency_s=0.1, bandwidth=1e3),
        outside=Link(latency_s=0.1, bandwidth=1e3),
        bus=bus,
    )
    return Cluster(nodes=(node,) * count, device="cuda")


@pytest.mark.parametrize(("collective", "bus", "passes"), [("ALL_REDUCE", 30.0, 2), ("ALL_GATHER", 20.0, 1)])
def test_a_measured_collective_takes_its_measured_time(collective: str, bus: float, passes: int):
    """Of twice the size it takes twice as long, but not twice the latency of its hops."""
    group = range(16)
    link = Traffic(measured_nodes(4), [group]).group_link(group)
    seconds = passes * 15 / 16 * 800 / bus
    assert link.seconds(Collective[collective], 800) == pytest.approx(seconds)
    assert 2 * seconds - passes * 15 * 0.1 <= 1e-9 + link.seconds(Collective[collective], 1600) < 2 * seconds


def test_what_counts_for_a_measured_ring_is_its_number_of_ranks():
    """Four groups of one device on each of four nodes have as many ranks as one full node, and a lane each."""
    groups = [range(first, 16, 4) for first in range(4)]
    alone, shared, whole = (
        Traffic(measured_nodes(4), of).group_link(of[0]).link.bandwidth for of in (groups[:1], groups, [range(16)])
    )
    inside = Traffic(measured_nodes(1), [range(4)]).group_link(range(4)).link.bandwidth
    assert alone == shared == pytest.approx(inside / 4)
    assert whole < inside / 2


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"nodes": (4, 1)}, "rising numbers"),
        ({"all_gather": (1.0,)}, "all_gather has 1 values; it needs 2"),
        ({"all_reduce": (1.0, 0.0)}, "more than 0"),
    ],
)
def test_impossible_measurements_are_refused(changes: dict, words: str):
    given = {"size": 800, "nodes": (1, 4), "all_reduce": (2.0, 1.0), "all_gather": (2.0, 1.0)}
    with pytest.raises(ClusterError, match=words):
        BusBandwidths(**given | changes)


def test_stages_on_one_device_share_a_tied_weight():
    """The first, third and last of four stages hold it: three stages of the interleaved order are on two devices."""
    node = Node(devices=2, inside=Link(latency_s=1e-6, bandwidth=1e9))
    cluster = Cluster(nodes=(node,), device="cpu")
    meshes = [Mesh(((PIPELINE, 1), (REPLICA, 1), (TENSOR, 1)), (rank,)) for rank in (0, 1)]
    v = PlacedTraffic(cluster, meshes, ((0,), (1,), (1,), (0,)))
    interleaved = PlacedTraffic(cluster, meshes, ((0,), (1,), (0,), (1,)))

    def tied_s(placed: PlacedTraffic, *stages: int) -> float:
        traffic, group = placed.summing(stages, apart=True)
        return traffic.seconds(Collective.ALL_REDUCE, group, 1e6)

    assert tied_s(v, 0, 3) == 0
    assert tied_s(interleaved, 0, 2) == 0
    assert tied_s(interleaved, 0, 2, 3) == tied_s(v, 0, 1) > 1e-3


@pytest.mark.parametrize(
    ("schedule", "stages_of_device", "changes"),
    [("1f1b", ((0,), (1,)), {"dp": 2}), ("chimera", ((0, 1), (0, 1)), {"dp": 1}), ("1f1b", ((0,), (1,)), {"tp": 2})],
)
def test_the_ranks_that_sum_a_gradient_are_the_ranks_that_the_runtime_sums_it_over(schedule, stages_of_device, changes):
    """Of the first shard, for a weight that the first and the last stage share, and for those of one stage."""
    plan = make_plan("gpt2", pp=2, schedule=schedule, shard_optimizer=True, **({"dp": 1} | changes))
    graph = captured("gpt2", 2).graph
    homes = tuple(tuple(d for d, stages in enumerate(stages_of_device) if stage in stages) for stage in range(2))
    placed = PlacedTraffic(two_nodes(None), plan.meshes, homes)
    found = holders(plan, schedule_of(plan), cut(graph, plan.stages), graph.trained)
    assert {each.stages for each in found.values()} == {(0,), (1,), (0, 1)}
    for each in found.values():
        assert tuple(sorted(placed.summing(each.stages)[1])) == each.ranks


def test_replicas_exchange_the_samples_that_both_have():
    for senders, receivers in product(range(1, 7), repeat=2):
        of_sample = [(sample // receivers, sample // senders) for sample in range(senders * receivers)]
        parts = {pair: count / len(of_sample) for pair, count in Counter(of_sample).items()}
        found = pieces(len(of_sample), sources=senders, targets=receivers)
        assert {(each.source, each.target): each.length / len(of_sample) for each in found} == parts


def test_replicas_send_to_those_of_their_own_pipeline():
    """Two pipelines, each in a node of its own, and one replica in the other node.

    Two replicas of the first stage and one of the second: ranks 0 and 1 send to rank 2, and ranks 4 and 5 to rank 6.
    The pairs 0, 2 and 1, 4 of the lists of all ranks would be of two pipelines.
    """
    node = Node(devices=4, inside=Link(latency_s=1e-6, bandwidth=8.0), outside=Link(latency_s=1e-3, bandwidth=2.0))
    cluster = Cluster(nodes=(node, node), device="cuda")

    def placed(*ranks: tuple[int, ...], pipelines: int) -> PlacedTraffic:
        meshes = [Mesh(((PIPELINE, pipelines), (REPLICA, len(one) // pipelines), (TENSOR, 1)), one) for one in ranks]
        return PlacedTraffic(cluster, meshes, ((0,), (1,)))

    apart = placed((0, 1, 4, 5), (2, 6), pipelines=2)
    assert not apart.crosses
    for pipeline in range(2):
        routes = apart.routes(0, 1, pipeline)
        assert [(one.sender, one.receiver, one.part, one.link.bandwidth) for one in routes] == [
            (0, 0, 0.5, 8.0),
            (1, 0, 0.5, 8.0),
        ]
    across = placed((0, 4), (1,), pipelines=1)
    assert [(one.link.bandwidth, one.link.latency_s) for one in across.routes(0, 1, 0)] == [(8.0, 1e-6), (2.0, 1e-3)]


@pytest.mark.parametrize("traffic", [Traffic, AmpTraffic])
def test_links_are_found_once_for_groups_on_alike_nodes(traffic: type[Traffic]):
    """Beside each other and spread over nodes, in the order of devices and shuffled."""
    searches = []

    class Counted(traffic):
        def _find_link(self, group):
            searches.append(group)
            return super()._find_link(group)

    fast = Node(devices=8, inside=Link(latency_s=1e-6, bandwidth=3e11), outside=Link(latency_s=1e-5, bandwidth=5e10))
    slow = Node(devices=4, inside=Link(latency_s=2e-6, bandwidth=1e11), outside=Link(latency_s=2e-5, bandwidth=1e10))
    cluster = Cluster(nodes=(fast,) * 10 + (slow,) * 10 + (fast,) * 5, device="cuda")
    devices = list(range(cluster.devices))
    shuffled = Random(1).sample(devices, len(devices))
    for order, size, most in ((devices, 4, 2), (devices, 2, 2), (shuffled, 3, len(devices))):
        searches.clear()
        groups = [tuple(order[first : first + size]) for first in range(0, len(order) // size * size, size)]
        together = Counted(cluster, groups)
        found = [together.group_link(group) for group in groups]
        assert len(searches) <= most
        assert found == [traffic(cluster, groups).group_link(group) for group in groups]
