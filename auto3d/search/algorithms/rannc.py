"""RaNNC's search: stages, replicas, pipelines and micro-batches together (Tanaka et al. 2021, algorithm 2)."""

from auto3d.capture.graph import Graph
from auto3d.cluster import Cluster, Link
from auto3d.cost.times import times_of
from auto3d.cost.training_options import MOMENTS
from auto3d.cost.work import ELEMENT_BYTES, PRECISION_BYTES
from auto3d.partition import Partition, PartitionRequest, partition
from auto3d.partition.cost import PartitionCosts
from auto3d.partition.stage import PartitionError
from auto3d.plan import Plan, PlanError
from auto3d.search.make import PlanMaker
from auto3d.search.partitioned import plan_of
from auto3d.search.planned_model import PlannedGraphs
from auto3d.search.search import Search
from auto3d.search.space import Candidate

_TIGHTER = 0.95  # factor on the memory limit for RaNNC's next try, if its plan does not fit by the cost model


def rannc(search: Search, seed: int) -> None:
    """Estimate RaNNC's only plan, made with our costs of the slowest kind of device; raises InputError if it has none.

    RaNNC chooses everything but the placement itself and ignores the axes of the search space. ``seed`` has no effect.
    """
    found, plan = _fitting(search.maker)
    candidate = Candidate(
        dp=plan.dp,
        tp=1,
        pp=plan.pp,
        micro_batch_size=plan.micro_batch_size,
        schedule=found.schedule,
        recompute=str(found.schedule_options["recompute"]),
        partition="rannc",
        placement="pipelines-first",
    )
    search.add(candidate, plan)
    search.seconds(candidate)


def _fitting(maker: PlanMaker) -> tuple[Partition, Plan]:
    """RaNNC's partition and its Plan, which passes all checks of ``maker``.

    RaNNC counts the memory of one micro-batch, of the inputs of the others and of the optimizer's state, but not of
    messages and fragments. If the cost model finds that its plan does not fit, RaNNC runs again with a lower limit. If
    no plan fits, raises InputError with the memory that the last one lacked.
    """
    memory = maker.model.cluster.memory_bytes or float("inf")
    short: PlanError | None = None
    while True:
        try:
            request = _request(maker, memory)
            found = partition("rannc", request)
        except PartitionError:
            if short is not None:
                raise short from None
            raise
        plan = plan_of(found, request, seed=maker.workload.seed)
        try:
            maker.check(plan)
            return found, plan
        except PlanError as error:
            if memory == float("inf"):
                raise
            short, memory = error, _TIGHTER * memory


def _request(maker: PlanMaker, memory_bytes: float) -> PartitionRequest:
    planned, model, workload = maker.planned, maker.model, maker.workload
    if not isinstance(planned, PlannedGraphs):
        raise PlanError("rannc needs a captured model: it cuts operations, not layers")
    cluster, training = model.cluster, model.training
    accelerator, link = cluster.slowest(range(cluster.devices)), message_link(cluster)
    weight = PRECISION_BYTES[training.precision]
    state = weight + training.sync_bytes + training.master_bytes + 4 * MOMENTS[training.optimizer]

    def costs_of(graph: Graph) -> PartitionCosts:
        times = times_of(planned.work_of(graph), accelerator)
        return PartitionCosts(
            forward_s=tuple(map(float, times.forward[1:] - times.forward[:-1])),
            backward_s=tuple(map(float, times.backward[1:] - times.backward[:-1])),
            latency_s=link.latency_s,
            bandwidth=link.bandwidth,
            memory_bytes=memory_bytes,
            state_factor=state / ELEMENT_BYTES,
            activation_factor=weight / ELEMENT_BYTES,
        )

    return PartitionRequest(
        graph_at=planned.graph,
        costs_of=costs_of,
        stages=None,
        micro_batch_size=1,
        global_batch=workload.global_batch,
        nodes=len(cluster.nodes),
        devices_per_node=cluster.devices_per_node,
        equal_slices=True,
    )


def message_link(cluster: Cluster) -> Link:
    """The link that RaNNC assumes for all messages: the slowest one inside a node.

    "We use the intra-node bandwidth, not the inter-node bandwidth", since devices are allocated so that few messages
    leave a node (section III-B, footnote 3). If no node has two devices, every message leaves its node.
    """
    inside = [node.inside for node in cluster.nodes if node.devices > 1]
    outside = [node.outside for node in cluster.nodes if node.outside is not None]
    return min(inside or outside or [cluster.nodes[0].inside], key=lambda link: link.bandwidth)
