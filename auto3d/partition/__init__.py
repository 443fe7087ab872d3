"""Graph -> stages. ``partition`` runs one method of the table in ``auto3d.partition.methods``."""

from auto3d.errors import InputError
from auto3d.partition.methods import METHODS, method_named
from auto3d.partition.problem import GraphProblem
from auto3d.partition.request import Partition, PartitionRequest

__all__ = ["METHODS", "Partition", "PartitionRequest", "partition"]


def partition(name: str, request: PartitionRequest) -> Partition:
    """The stages that the method called ``name`` chooses; raises InputError where the name or a number is invalid."""
    method = method_named(name)
    if method.chooses_stages:
        if request.stages is not None:
            raise InputError(f"stages: {request.stages} is given; {name} finds the number of stages itself")
        return method.choose_partition(request)
    if request.stages is None or request.stages < 1:
        raise InputError(f"stages: {request.stages or 'none'} given; {name} takes a number of 1 or more")
    problem = GraphProblem(
        graph=request.graph,
        costs=request.costs,
        stages=request.stages,
        micro_batches=max(1, request.global_batch // request.micro_batch_size),
        cuts=request.cuts,
    )
    stages = method.choose_stages(problem)
    return Partition(stages=stages, replicas=(1,) * len(stages))
