"""Refuses optimizers that a plan cannot run, before any rank starts; finds the parameters without weight decay."""

from collections.abc import Collection, Sequence
from fnmatch import fnmatchcase

from auto3d.capture.graph import Graph
from auto3d.capture.model import CapturedModel
from auto3d.capture.skeleton import skeleton
from auto3d.errors import InputError
from auto3d.partition.stage import cut
from auto3d.plan import Plan
from auto3d.runtime.optimizer.build import check_schedule
from auto3d.runtime.optimizer.classes import is_elementwise, traits_of
from auto3d.runtime.optimizer.parameter_groups import UpdateRules
from auto3d.runtime.settings import BIASES_AND_NORMS, MUON, OptimizerSettings, TrainingSettings
from auto3d.schedule.shape import shape_of


def check_optimizer(captured: CapturedModel, plan: Plan, settings: TrainingSettings, rules: UpdateRules) -> None:
    """Raise InputError unless ranks of ``plan`` can update their part of the weights by ``rules`` like one process."""
    optimizer = settings.optimizer
    check_schedule(optimizer, settings.iterations)
    if optimizer.offload and settings.device == "cpu" and settings.emulation is None:
        raise InputError("offload_optimizer: true, but ranks on CPUs hold the optimizer's state on the host; use false")
    if optimizer.offload and (adding := [rule.optimizer for rule in rules.values() if traits_of(rule).adds_up]):
        raise InputError(f"offload_optimizer: true, but {adding[0]} adds up numbers over the ranks' devices; use false")
    if optimizer.offload and (averaging := [rule.optimizer for rule in rules.values() if traits_of(rule).averages]):
        raise InputError(
            f"offload_optimizer: true, but {averaging[0]} has other weights in evaluation, to which only those on the "
            "host would be switched; use false"
        )
    check_updates(captured.graph, plan, rules)


def check_updates(graph: Graph, plan: Plan, rules: UpdateRules) -> None:
    """Raise InputError unless the optimizers of ``rules`` can update what each rank of ``plan`` has of the weights."""
    for rule in dict.fromkeys(rules.values()):
        if traits_of(rule).adds_up:
            _check_adds_up(graph, plan, rule, rules)
        _check_rule(graph, plan, rule, [name for name, other in rules.items() if other == rule])


def _check_adds_up(graph: Graph, plan: Plan, rule: OptimizerSettings, rules: UpdateRules) -> None:
    """Raise InputError unless all ranks of ``plan`` make each step of ``rule`` once, at the same time."""
    adds = f"optimizer: {rule.optimizer} adds up numbers over all parameters"
    if any(other != rule and other.optimizer == rule.optimizer for other in rules.values()):
        raise InputError(
            f"{adds}, and groups of them have optimizers of their own; give it one group, with a weight_decay of 0 or "
            "without exempt parameters"
        )
    shape = shape_of(plan)
    if shape.asynchronous or len(shape.device_of) > plan.pp:
        raise InputError(
            f"{adds} when all their gradients are known, and under {plan.schedule} a rank updates several stages one "
            "after the other; use a synchronous schedule with one stage on each device, such as 1f1b"
        )
    for number, stage in enumerate(cut(graph, plan.stages)):
        if not any(rules.get(name) == rule for name in stage.state):
            raise InputError(f"{adds}, and stage {number} trains none of them; use fewer stages")


def _check_rule(graph: Graph, plan: Plan, rule: OptimizerSettings, names: Sequence[str]) -> None:
    """Raise InputError unless ranks of ``plan`` can update the parameters called ``names`` by ``rule``."""
    dimensions = traits_of(rule).dimensions
    for name in names:
        shape = graph.parameters[name].shape
        if max(1, min(len(shape), 4)) not in dimensions:
            raise InputError(
                f"optimizer: {rule.optimizer} cannot update {name} of shape {list(shape)}; give it another one by "
                f"parameter_groups, or use {MUON}, which leaves all but hidden matrices to adamw"
            )
    if not plan.shard_optimizer and not plan.split.keys() & set(names):
        return
    if is_elementwise(rule) and not rule.clip_ratio:
        return
    mixes, otherwise = f"optimizer: {rule.optimizer} combines the elements of a weight", " or an elementwise optimizer"
    if rule.clip_ratio:
        mixes, otherwise = "clip_ratio: it compares norms of rows of a weight", ""
    if plan.shard_optimizer:
        raise InputError(f"{mixes}, and shard_optimizer gives each rank a slice of it; use shard_optimizer=false")
    split = min(plan.split.keys() & set(names))
    raise InputError(f"{mixes}, and tp = {plan.tp} splits {split}; use tp = 1{otherwise}")


def exempt_names(captured: CapturedModel, exempt: tuple[str, ...]) -> frozenset[str]:
    """The names of the parameters of ``captured`` without weight decay; InputError if an entry matches none."""
    key = "exempt", exempt
    if exempt and key not in captured.derived:
        captured.derived[key] = frozenset().union(*(_matching(captured, entry) for entry in exempt))
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
