"""Refuses optimizers that a plan cannot run, before any rank starts; resolves the parameters without weight decay."""

from collections.abc import Collection
from fnmatch import fnmatchcase

from auto3d.capture.model import CapturedModel
from auto3d.capture.skeleton import skeleton
from auto3d.errors import InputError
from auto3d.plan import Plan
from auto3d.runtime.optimizer import check_schedule
from auto3d.runtime.optimizer_class import is_elementwise, optimizer_class
from auto3d.runtime.settings import BIASES_AND_NORMS, TrainingSettings


def check_optimizer(captured: CapturedModel, plan: Plan, settings: TrainingSettings) -> None:
    """Raise InputError unless ranks of ``plan`` can update their part of the weights as one process updates all."""
    optimizer = settings.optimizer
    optimizer_class(optimizer)
    check_schedule(optimizer, settings.iterations)
    if optimizer.offload and settings.device == "cpu" and settings.emulation is None:
        raise InputError("offload_optimizer: true, but ranks on CPUs hold the optimizer's state on the host; use false")
    if is_elementwise(optimizer):
        return
    mixes = f"optimizer: {optimizer.optimizer} combines the elements of a weight"
    if plan.shard_optimizer:
        raise InputError(f"{mixes}, and shard_optimizer gives each rank a slice of it; use shard_optimizer=false")
    split = next((name for name in sorted(plan.split) if name in captured.graph.trained), None)
    if split is not None:
        raise InputError(f"{mixes}, and tp = {plan.tp} splits {split}; use tp = 1 or an elementwise optimizer")


def exempt_names(captured: CapturedModel, exempt: tuple[str, ...]) -> frozenset[str]:
    """The names of the parameters of ``captured`` without weight decay; InputError if an entry matches none."""
    key = "exempt", exempt
    if exempt and key not in captured.derived:
        captured.derived[key] = frozenset().union(*(_matching(captured, each) for each in exempt))
    names: frozenset[str] = captured.derived.get(key, frozenset())
    return names


def _matching(captured: CapturedModel, pattern: str) -> Collection[str]:
    names = captured.graph.parameters
    if pattern == BIASES_AND_NORMS:
        from transformers import Trainer  # it takes seconds to import

        model = skeleton(captured.exported.build).model
        decayed = Trainer.get_decay_parameter_names(None, model)  # type: ignore[arg-type]  # it does not use its self
        return names.keys() - set(decayed)
    matching = [name for name in names if fnmatchcase(name, pattern)]
    if not matching:
        some = ", ".join(list(names)[:3])
        raise InputError(
            f"weight_decay_exempt: {pattern!r} matches no parameter; it takes {BIASES_AND_NORMS}, names or globs of "
            f"names such as {some}"
        )
    return matching
