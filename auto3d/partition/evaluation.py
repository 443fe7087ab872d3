"""The stages of a Plan in the model's evaluation mode, whose Graph lacks operations that only training has."""

from collections.abc import Sequence
from dataclasses import replace

from auto3d.capture.graph import Graph, GraphNode
from auto3d.plan import PlanError, StagePlan, stages_of_operations


def stages_in_evaluation(stages: Sequence[StagePlan], training: Graph, evaluation: Graph) -> tuple[StagePlan, ...]:
    """The stages of ``evaluation`` that match the ``stages`` of ``training``, two Graphs of one model.

    An operation of both Graphs stays on its stage. Another goes to the first stage that has all that it reads. No stage
    gets an operation on a parameter or buffer that it does not have in training; PlanError if that is impossible, or if
    a stage would have no operations.
    """
    stage_of = {
        (training.nodes[position].name, training.nodes[position].operator): index
        for index, stage in enumerate(stages)
        for span in stage.operations
        for position in range(*span)
    }
    holders: dict[str, set[int]] = {}  # parameter or buffer -> stages that have it
    for node in training.nodes:
        for name in node.state:
            holders.setdefault(name, set()).add(stage_of[node.name, node.operator])

    def possible(node: GraphNode) -> set[int]:
        """The stages that have the state of ``node``, apart from constants."""
        holding = set(range(len(stages)))
        for name in node.state:
            if name not in evaluation.constants:
                holding &= holders.get(name, set())
        return holding

    limit: dict[str, int] = {}  # value -> last stage that may make it
    latest: list[int] = []
    for node in reversed(evaluation.nodes):
        allowed = possible(node)
        if not allowed:
            raise PlanError(
                f"stages: in evaluation {node.name}, code of {node.module or 'the model'}, uses "
                f"{' and '.join(node.state)}, which no stage has in training; such a model cannot be evaluated here"
            )
        bound = min((limit[value.name] for value in node.outputs if value.name in limit), default=len(stages) - 1)
        bound = max((stage for stage in allowed if stage <= bound), default=bound)
        latest.append(bound)
        for name in node.reads:
            limit[name] = min(bound, limit.get(name, bound))
    made_on: dict[str, int] = {}
    stage_numbers: list[int] = []
    for node, last in zip(evaluation.nodes, reversed(latest), strict=True):
        # What depends on inputs alone is copied to every stage that uses it, so it binds no user to a stage.
        first = max((made_on[name] for name in node.reads if name in made_on), default=0)
        wanted = stage_of.get((node.name, node.operator), first)
        if node.from_inputs:
            stage = last
        else:
            allowed = possible(node)
            fitting = [stage for stage in sorted(allowed) if first <= stage <= last] or [
                stage for stage in sorted(allowed) if stage >= first
            ]
            if not fitting:
                raise PlanError(
                    f"stages: in evaluation {node.name} uses {' and '.join(node.state)}, which only stages before "
                    f"{first} have, and a value that stage {first} makes; move the bounds of the plan's stages"
                )
            stage = min(fitting, key=lambda stage: (abs(stage - wanted), stage))
            made_on.update((value.name, stage) for value in node.outputs)
        stage_numbers.append(stage)
    if len(missing := set(range(len(stages))) - set(stage_numbers)) > 0:
        raise PlanError(
            f"stages: stage {min(missing)} has only operations that evaluation leaves out, such as dropout; move its "
            "bounds"
        )
    same = stages_of_operations(stage_numbers)
    return tuple(replace(there, replicas=here.replicas) for here, there in zip(stages, same, strict=True))
