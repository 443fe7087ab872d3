"""The predicted memory of one plan: the peak of each pipeline device, its witness and its largest tensors."""

from dataclasses import dataclass
from pathlib import Path

from auto3d.cost.memory.device import DeviceMemory, HeldTensor
from auto3d.cost.model import CostModel
from auto3d.errors import InputError
from auto3d.plan import Plan, PlanError
from auto3d.schedule import samples_at_once
from auto3d.search.make import PlanMaker
from auto3d.search.planned_model import PlannedModel
from launch.model.candidates import candidate_of, task
from launch.model.costs import cost_model, subject_of
from launch.recipe.load import LoadedRecipe


@dataclass(frozen=True, kw_only=True)
class PredictedMemory:
    """Lists have one entry per pipeline device."""

    plan: Plan
    model: CostModel
    devices: tuple[DeviceMemory, ...]
    largest: tuple[tuple[HeldTensor, ...], ...]
    capacity: tuple[float | None, ...]  # bytes that a process may fill; None where that is not known


def predicted_memory(recipe: LoadedRecipe, plan_file: str | None) -> PredictedMemory:
    """The memory of the plan in ``plan_file``, or of the recipe's own, by the system that ``prediction`` describes.

    Raises InputError where there is no plan, or where it does not fit the model.
    """
    subject = subject_of(recipe)
    model = cost_model(recipe, subject)
    if plan_file is not None:
        plan = _read(plan_file, subject)
    elif recipe.values.plan is not None:
        try:
            plan = PlanMaker(subject, model, task(recipe)).unlimited(candidate_of(recipe.values.plan))
        except InputError as error:
            raise recipe.error("plan", str(error)) from None
    else:
        problem = "the recipe has no plan; give --plan FILE, or plan.dp=… plan.pp=… plan.micro_batch_size=…"
        raise recipe.error("plan", problem)
    if plan.ranks > model.cluster.devices:
        raise recipe.error("plan", f"needs {plan.ranks} devices; the cluster has {model.cluster.devices}")
    devices = model.memory.devices(plan)
    return PredictedMemory(
        plan=plan,
        model=model,
        devices=devices,
        largest=tuple(model.memory.largest(plan, device) for device in range(len(devices))),
        capacity=tuple(model.cluster.memory_of(mesh.ranks) for mesh in plan.meshes),
    )


def _read(plan_file: str, subject: PlannedModel) -> Plan:
    try:
        plan = Plan.from_json(Path(plan_file).read_bytes())
        samples = samples_at_once(plan)
    except InputError as error:
        raise PlanError(f"{plan_file}: {error}") from None
    if plan.graph and plan.graph != subject.fingerprint(samples):
        raise PlanError(f"{plan_file}: it was made for another model, or for another version of it; plan again")
    return plan
