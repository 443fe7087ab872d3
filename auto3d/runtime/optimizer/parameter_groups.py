"""How each parameter is updated: the optimizer, the learning rate and the weight decay of its group."""

from collections.abc import Collection, Mapping
from dataclasses import replace
from fnmatch import fnmatchcase

from auto3d.capture.graph import Graph
from auto3d.errors import InputError
from auto3d.runtime.settings import MUON, OptimizerSettings, ParameterGroup

UpdateRules = Mapping[str, OptimizerSettings]
"""Trained parameter -> the settings of its update, which have neither groups nor exempt parameters."""

_EMBEDDING = "aten.embedding.default"


def update_rules(
    graph: Graph, settings: OptimizerSettings, exempt: Collection[str] = ()
) -> dict[str, OptimizerSettings]:
    """The update of each parameter that ``graph`` trains; those in ``exempt`` have no weight decay.

    Raises InputError for a group without parameters.
    """
    own = replace(settings, groups=(), exempt=())
    hidden = hidden_matrices(graph) if settings.optimizer == MUON else frozenset()
    members = [_members(graph, group) for group in settings.groups]
    used: set[int] = set()
    rules: dict[str, OptimizerSettings] = {}
    for name in graph.parameters:
        if name not in graph.trained:
            continue
        rule = own
        if settings.optimizer == MUON and name not in hidden:
            rule = replace(own, optimizer="adamw", arguments={})
        number = next((number for number, names in enumerate(members) if name in names), None)
        if number is not None:
            rule = _in_group(rule, settings.groups[number])
            used.add(number)
        rules[name] = replace(rule, weight_decay=0.0) if name in exempt else rule
    used.update(number for number, group in enumerate(settings.groups) if group.script_group is not None)
    if unused := sorted({*range(len(members))} - used):
        raise InputError(_unused(graph, settings.groups[unused[0]], unused[0], members[unused[0]]))
    return rules


def hidden_matrices(graph: Graph) -> frozenset[str]:
    """The trained matrices of ``graph``, without tables of embeddings and without the last that the model uses.

    These are what Muon is for (K. Jordan and others, 2024, "Muon: An optimizer for hidden layers in neural networks").
    """
    looked_up = {name for node in graph.nodes if node.operator == _EMBEDDING for name in node.state}
    matrices = {name for name in graph.trained if len(graph.parameters[name].shape) == 2}
    used = [name for node in graph.nodes for name in (*node.state, *node.copies) if name in matrices]
    return frozenset(matrices - looked_up - set(used[-1:]))


def _members(graph: Graph, group: ParameterGroup) -> set[str]:
    return {
        name
        for name, value in graph.parameters.items()
        if name in graph.trained
        and group.dimensions in (None, len(value.shape))
        and (name in group.names if group.script_group is not None else _matches(name, group.names))
    }


def _matches(name: str, patterns: Collection[str]) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns)


def _in_group(rule: OptimizerSettings, group: ParameterGroup) -> OptimizerSettings:
    rule = replace(rule, script_group=group.script_group)
    if group.optimizer is not None:
        rule = replace(rule, optimizer=group.optimizer, arguments=dict(group.arguments))
    if group.learning_rate is not None:
        rule = replace(rule, learning_rate=group.learning_rate)
    if group.weight_decay is not None:
        rule = replace(rule, weight_decay=group.weight_decay)
    return rule


def _unused(graph: Graph, group: ParameterGroup, number: int, names: Collection[str]) -> str:
    """Why ``group``, which has these ``names``, updates none."""
    if names:
        return f"parameter_groups[{number}]: earlier groups have all of its parameters, such as {min(names)}"
    some = ", ".join(sorted(graph.trained)[:3])
    dimensions = "" if group.dimensions is None else f" of {group.dimensions} dimensions"
    return (
        f"parameter_groups[{number}]: {', '.join(group.names)} matches no trained parameter{dimensions}; it takes "
        f"names, or globs of names, such as {some}"
    )
