"""Plan -> Certificate: how far the order of a Plan is from the best order of its stages."""

from dataclasses import replace

from auto3d.cost.model import CostModel
from auto3d.errors import InputError
from auto3d.plan import Plan
from auto3d.schedule.options import SYNC
from auto3d.schedule.shape import shape_of
from auto3d.search.order_problem import problem_of
from auto3d.synthesis.certificate import Certificate, certificate


def certificate_of(plan: Plan, model: CostModel, *, may_recompute: bool, seconds: float) -> Certificate:
    """The distance of the order of ``plan`` from the best order of its stages on their devices, in seconds.

    It covers the orders of ``problem_of(plan)``: their activations fit beside all else that the devices hold. If
    ``may_recompute``, these are the orders in which any stage may recompute, and those in which none does; otherwise,
    those in which the same stages may as in ``plan``. An exact solver may improve the bound for ``seconds``. Raises
    InputError if times are not simulated, or fit one order only.
    """
    if model.method != "simulated":
        raise InputError(f"times are by {model.method}; a bound needs simulated ones")
    shape = shape_of(plan)
    allowed = [shape.recompute]
    if may_recompute:
        every: frozenset[int] = frozenset(range(shape.stages))
        allowed = [every, frozenset()] if shape.recompute else [frozenset(), every]  # the order itself is of the first
    problems = [problem_of(plan, model, may_recompute=stages) for stages in allowed]
    if plan.schedule_options.get("sync", SYNC[0]) != SYNC[0]:
        # A problem has all syncs and updates at the end. Without them, its bound also holds where they come early.
        none = (0.0,) * shape.stages
        problems = [replace(problem, costs=replace(problem.costs, sync=none, update=none)) for problem in problems]
    return certificate(problems, shape.schedule(), model.seconds(plan), seconds=seconds)
