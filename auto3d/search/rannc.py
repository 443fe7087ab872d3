"""RaNNC's own search: stages, replicas, pipelines and micro-batches together (Tanaka et al. 2021, algorithm 2)."""

from auto3d.capture.graph import Graph
from auto3d.cost.model import MOMENTS
from auto3d.cost.times import times_of
from auto3d.cost.work import ELEMENT_BYTES, PRECISION_BYTES
from auto3d.partition import Request, partition
from auto3d.partition.cost import PartitionCosts
from auto3d.plan import PlanError
from auto3d.search.partitioned import plan_of
from auto3d.search.search import Search
from auto3d.search.space import Candidate
from auto3d.search.subject import CapturedSubject


def rannc(search: Search, seed: int) -> None:
    """Its one plan, under our costs of the slowest kind of device; raises InputError where it has none.

    It chooses everything but placement by itself and takes no notice of the axes. ``seed`` is for the other algorithms.
    """
    subject, model, task = search.maker.subject, search.maker.model, search.maker.task
    if not isinstance(subject, CapturedSubject):
        raise PlanError("rannc needs a captured model: it cuts operations, not layers")
    cluster, training = model.cluster, model.training
    accelerator = cluster.slowest(range(cluster.devices))
    link = cluster.nodes[0].outside if len(cluster.nodes) > 1 else cluster.nodes[0].inside
    weight = PRECISION_BYTES[training.precision]
    state = weight + training.sync_bytes + training.master_bytes + 4 * MOMENTS[training.optimizer]

    def costs_of(graph: Graph) -> PartitionCosts:
        times = times_of(subject.work_of(graph), accelerator)
        return PartitionCosts(
            forward_s=tuple(map(float, times.forward[1:] - times.forward[:-1])),
            backward_s=tuple(map(float, times.backward[1:] - times.backward[:-1])),
            latency_s=link.latency_s,
            bandwidth=link.bandwidth,
            memory_bytes=cluster.memory_bytes or float("inf"),
            state_factor=state / ELEMENT_BYTES,
        )

    request = Request(
        graph_at=subject.graph,
        costs_of=costs_of,
        sharding=None,
        stages=None,
        micro_batch_size=1,
        global_batch=task.global_batch,
        nodes=len(cluster.nodes),
        devices_per_node=cluster.devices_per_node,
        equal_shares=True,
    )
    found = partition("rannc", request)
    plan = plan_of(found, request, seed=task.seed)
    candidate = Candidate(
        dp=plan.dp,
        tp=1,
        pp=plan.pp,
        micro_batch_size=plan.micro_batch_size,
        schedule=found.schedule,
        recompute=found.schedule_options["recompute"],
        partition="rannc",
        placement="pipelines-first",
    )
    search.add(candidate, plan)
    search.seconds(candidate)
