"""RaNNC's search: stages, replicas, pipelines and micro-batches together (Tanaka et al. 2021, algorithm 2)."""

from auto3d.capture.graph import Graph
from auto3d.cost.partition_costs import handling_inside, link_inside, partition_costs
from auto3d.partition import Partition, PartitionRequest, partition
from auto3d.partition.cost import PartitionCosts
from auto3d.partition.methods.rannc import LEAST_CAPTURED
from auto3d.partition.stage import PartitionError
from auto3d.plan import Plan, PlanError
from auto3d.search.axes import Candidate
from auto3d.search.make import PlanMaker
from auto3d.search.partitioned import plan_of
from auto3d.search.planned_model import PlannedGraphs
from auto3d.search.planner_options import PlannerOptions
from auto3d.search.search import Search

_TIGHTER = 0.95  # factor on the memory limit for RaNNC's next try, if its plan does not fit by the cost model


def rannc(search: Search, seed: int) -> None:
    """Estimate RaNNC's only plan; raises InputError if it has none.

    RaNNC runs each candidate stage to profile it, as `auto3d profile --stages` does. Without that, a stage takes what
    the cost model says on the slowest kind of device: the sum of its measured subgraphs, or an estimate. RaNNC chooses
    everything but the placement itself and ignores the axes of the search space. ``seed`` has no effect.
    """
    estimate_plan(search, any_depth=False)


def estimate_plan(search: Search, *, any_depth: bool) -> None:
    """Estimate RaNNC's plan; with ``any_depth``, it takes the fastest number of stages, else the fewest that fit."""
    answer, plan = _fitting(search.maker, search.options, any_depth=any_depth)
    candidate = Candidate(
        dp=plan.dp,
        tp=1,
        pp=plan.pp,
        micro_batch_size=plan.micro_batch_size,
        schedule=answer.schedule,
        recompute=str(answer.schedule_options["recompute"]),
        partition="rannc",
        placement="pipelines-first",
    )
    search.add(candidate, plan)
    search.seconds(candidate)


def _fitting(maker: PlanMaker, options: PlannerOptions, *, any_depth: bool) -> tuple[Partition, Plan]:
    """RaNNC's partition and its Plan, which passes all checks of ``maker``.

    RaNNC counts the memory of one micro-batch, of the inputs of the others and of the optimizer's state, but not of
    messages and fragments. If the cost model finds that its plan does not fit, RaNNC runs again with a lower limit. If
    no plan fits, raises InputError with the memory that the last plan lacked.
    """
    memory = maker.model.cluster.memory_bytes or float("inf")
    short: PlanError | None = None
    while True:
        try:
            request = partition_request(maker, memory, options, any_depth=any_depth)
            answer = partition("rannc", request)
        except PartitionError:
            if short is not None:
                raise short from None
            raise
        plan = plan_of(answer, request, seed=maker.workload.seed)
        try:
            maker.check(plan)
            return answer, plan
        except PlanError as error:
            if memory == float("inf"):
                raise
            short, memory = error, _TIGHTER * memory


def partition_request(
    maker: PlanMaker, memory_bytes: float, options: PlannerOptions | None = None, *, any_depth: bool = False
) -> PartitionRequest:
    options = options or PlannerOptions()
    planned, model, workload = maker.planned, maker.model, maker.workload
    if not isinstance(planned, PlannedGraphs):
        raise PlanError("rannc needs a captured model: it cuts operations, not layers")
    cluster = model.cluster
    accelerator = cluster.slowest(range(cluster.devices))

    def costs_of(graph: Graph) -> PartitionCosts:
        cuts = planned.cuts(LEAST_CAPTURED)  # RaNNC interpolates: all its Graphs have these operations
        times = model.times_of_work(planned.work_of(graph), cuts, graph.micro_batch_size, accelerator)
        return partition_costs(
            times,
            accelerator,
            link_inside(cluster),
            model.training,
            memory_bytes=memory_bytes,
            handling=handling_inside(cluster),
        )

    return PartitionRequest(
        graph_at=planned.graph,
        costs_of=costs_of,
        stages=None,
        micro_batch_size=1,
        global_batch=workload.global_batch,
        nodes=len(cluster.nodes),
        devices_per_node=cluster.devices_per_node,
        any_depth=any_depth,
        stage_seconds=model.stage_seconds,
        equal_slices=True,
        blocks=options.rannc_blocks,
        smallest_micro_batch=options.rannc_smallest_micro_batch,
    )
