"""The optimizer that a script sees, and the settings of those that update the weights.

transformers' Trainer, or the script, makes an optimizer of the model's parameters. It makes no step here: each rank
makes optimizers of the same classes for what it holds of the weights. Before each step they get the numbers of its
groups, which schedules and callbacks change.
"""

import inspect
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import nn
from transformers.optimization import Adafactor

from auto3d.errors import InputError
from auto3d.runtime.optimizer.classes import (
    attributes_of,
    averages,
    check_closure,
    import_path,
    make_optimizer,
    traits_of,
    trying,
    use_weights,
)
from auto3d.runtime.settings import OptimizerSettings, ParameterGroup
from auto3d.trainer.rank_zero import first_and_more, tell

KEPT = ("optim", "optim_args", "adam_epsilon", "learning_rate", "weight_decay", "adam_beta1", "adam_beta2")
"""Arguments with which transformers makes an optimizer, which keeps them."""
_NAMES: Mapping[type, str] = {torch.optim.AdamW: "adamw", torch.optim.SGD: "sgd", Adafactor: "adafactor"}
_CHOSEN = ("foreach", "fused")  # a stage chooses them by its device
_ADDED = ("initial_lr", "max_lr", "min_lr", "base_momentum", "max_momentum", "swa_lr", "name", "param_names")
"""What schedules of torch, and scripts that name their groups, add to a group."""
_OF_SCHEDULE = ("step", "_opt_called")  # attributes that a schedule of torch gives its optimizer
_OF_TRAINER = ("eval", "train")  # attributes that a Trainer gives an optimizer that averages
_REFUSED = ("capturable", "differentiable")
_STAND_IN = 1e-3  # a learning rate for optimizers that are tried before any step, where the first rate is 0
LEFT_OUT = -1  # the ``script_group`` of parameters that a script's optimizer lacks


class StateOnRanks(dict):
    """In place of the state of a script's optimizer: what the ranks' optimizers keep is not there to be read."""

    has_learnt = False  # whether ranks have made steps for this optimizer

    def _refuse(self, *_: Any) -> Any:
        raise InputError(
            "Trainer: optimizer.state: refused: each rank keeps that of its part of the weights, and the optimizer "
            "that a script sees has none; a checkpoint holds it"
        )

    __getitem__ = __setitem__ = __delitem__ = __iter__ = __len__ = __contains__ = _refuse
    get = items = keys = values = clear = pop = popitem = setdefault = update = _refuse  # type: ignore[assignment]


def check_optimizer(optimizer: Any, model: nn.Module) -> None:
    """Raise InputError unless ``optimizer`` is a new one of parameters of ``model``."""
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise InputError(f"Trainer: its optimizer is a {type(optimizer).__name__}; it takes a torch.optim.Optimizer")
    check_closure(type(optimizer), type(optimizer).__name__)
    of_model = set(map(id, model.parameters()))
    for number, group in enumerate(optimizer.param_groups):
        for name in _REFUSED:
            if group.get(name):
                raise InputError(f"Trainer: its optimizer has {name}=True, which no stage does; leave it out")
        if not _is_number(rate := _highest_rate(group)):
            raise InputError(
                f"Trainer: param_groups[{number}] of its optimizer has the lr {rate!r}; it takes a number, which a "
                "schedule can change"
            )
        for parameter in group["params"]:
            if id(parameter) not in of_model:
                raise InputError(
                    f"Trainer: param_groups[{number}] of its optimizer has a parameter of shape "
                    f"{tuple(parameter.shape)} that is none of the model's; make it of the parameters of the model "
                    "that the Trainer gets"
                )
    if has_own_steps(optimizer):
        raise InputError(
            f"Trainer: its optimizer, a {type(optimizer).__name__}, has hooks of its steps, or another step than its "
            "class, and makes no step here; put what they do into a class of optimizers"
        )
    if _has_learnt(optimizer):
        raise InputError(
            "Trainer: its optimizer has made steps before: the pipeline's begin without what it has learnt; give a new "
            "one, or resume from a checkpoint"
        )


def has_own_steps(optimizer: torch.optim.Optimizer) -> bool:
    """Whether something beside its class decides what ``optimizer`` does in a step."""
    step = getattr(optimizer.step, "__func__", optimizer.step)
    if inspect.unwrap(step) is not inspect.unwrap(type(optimizer).step):  # schedules of torch wrap it
        return True
    return bool(optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks)


def optimizer_settings(optimizer: torch.optim.Optimizer, model: nn.Module, *, clip_norm: float) -> OptimizerSettings:
    """Settings by which ranks update the parameters of ``model`` as ``optimizer`` would.

    Trained parameters that it does not have keep their values; their gradients count in the norm. Raises InputError for
    an optimizer whose groups do not say all that it does.
    """
    name_of = {id(parameter): name for name, parameter in model.named_parameters()}
    groups = [_group_of(optimizer, number, name_of) for number in range(len(optimizer.param_groups))]
    if len(groups) > 1 and _adds_up(groups[0]):
        groups = [_as_one(groups, type(optimizer).__name__)]
    else:
        _check_groups_alone(optimizer)
    names = {name for group in groups for name in group.names}
    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    first = groups[0]
    assert first.optimizer is not None, "a script's group says all"
    assert first.learning_rate is not None, "a script's group says all"
    return OptimizerSettings(
        optimizer=first.optimizer,
        arguments=first.arguments,
        learning_rate=first.learning_rate,
        groups=(*groups, *([_left_out(trained - names)] if trained - names else [])),
        momentum=0.0,
        clip_norm=clip_norm,
    )


def take_thawed(
    optimizer: torch.optim.Optimizer, model: nn.Module, frozen: Sequence[nn.Parameter], decayed: Collection[str]
) -> None:
    """Put the parameters of ``frozen`` that are trained now into the groups of ``optimizer``, and say so.

    transformers has made it of the others: its first group is for those called ``decayed``, the second for the rest.
    """
    has = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    missing = set(map(id, frozen)) - has
    thawed = {
        name: parameter
        for name, parameter in model.named_parameters()
        if parameter.requires_grad and id(parameter) in missing
    }
    for name, parameter in thawed.items():
        optimizer.param_groups[0 if name in decayed else 1]["params"].append(parameter)
    if thawed:
        tell(
            f"{first_and_more(list(thawed))}: frozen when the optimizer was made, and trained from now on; the "
            "optimizer of one process would lack what has thawed, and leave it as it is"
        )


def tell_left_out(settings: OptimizerSettings, told: set[str]) -> None:
    """Say, on rank 0, which trained parameters are in no group of the script's optimizer, once for each (``told``)."""
    names = [name for group in settings.groups if group.script_group == LEFT_OUT for name in group.names]
    names = [name for name in names if name not in told]
    told.update(names)
    if names:
        tell(
            f"{first_and_more(names)}: trained, but in no group of the optimizer, which leaves it as it is, as in "
            "transformers"
        )


def numbers_of(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    """Per group of ``optimizer``, the numbers that change how it updates: its rate, decay, betas, and so on.

    What is no argument of its class, such as a count of steps, is no such number.
    """
    accepted = _arguments_of(type(optimizer))
    return [
        {name: _plain(value) for name, value in group.items() if name in accepted and _is_number(_plain(value))}
        for group in optimizer.param_groups
    ]


def fixed_of(optimizer: torch.optim.Optimizer) -> dict[str, str]:
    """What ``optimizer`` says, beside numbers and parameters, that ranks take over only where they make theirs.

    Text by a name that a user knows: options of its groups, its hooks, and its own attributes.
    """
    accepted = _arguments_of(type(optimizer))
    options = {
        f"{name} of optimizer.param_groups[{place}]": repr(group[name])
        for place, (group, numbers) in enumerate(zip(optimizer.param_groups, numbers_of(optimizer), strict=True))
        for name in group
        if name in accepted and name not in {*numbers, "params"}
    }
    attributes = {f"{name} of optimizer": text for name, text in attributes_of(optimizer).items()}
    return options | {"the hooks of optimizer": str(has_own_steps(optimizer))} | attributes


def parameters_of(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    """Per group of ``optimizer``, which parameters it has."""
    return [{"params": tuple(map(id, group["params"]))} for group in optimizer.param_groups]


def _arguments_of(kind: type[torch.optim.Optimizer]) -> Mapping[str, inspect.Parameter]:
    """The arguments of the constructor of ``kind``."""
    return inspect.signature(kind).parameters


def _group_of(optimizer: torch.optim.Optimizer, number: int, name_of: Mapping[int, str]) -> ParameterGroup:
    kind, group = type(optimizer), optimizer.param_groups[number]
    arguments = _arguments(optimizer, group)
    return ParameterGroup(
        names=tuple(name_of[id(weight)] for weight in group["params"] if id(weight) in name_of),  # some may be replaced
        optimizer=_NAMES.get(kind) or import_path(kind),
        arguments=arguments,
        learning_rate=float(_highest_rate(group)) or _STAND_IN,
        weight_decay=float(_plain(group.get("weight_decay")) or 0.0),
        script_group=number,
    )


def _adds_up(group: ParameterGroup) -> bool:
    """Whether the optimizer of ``group`` adds up numbers over all parameters."""
    assert group.optimizer is not None, "a script's group says all"
    return traits_of(
        OptimizerSettings(
            optimizer=group.optimizer, arguments=group.arguments, learning_rate=_STAND_IN, weight_decay=0.0
        )
    ).adds_up


def _as_one(groups: Sequence[ParameterGroup], kind: str) -> ParameterGroup:
    """``groups`` as one of all their parameters. Raises InputError unless they update alike."""
    first = groups[0]
    if any(replace(other, names=(), script_group=0) != replace(first, names=(), script_group=0) for other in groups):
        raise InputError(
            f"Trainer: its optimizer, a {kind}, adds up numbers over all of its groups, which ranks update as one; "
            "give them the same numbers, such as a weight_decay of 0"
        )
    return replace(first, names=tuple(name for group in groups for name in group.names))


def check_groups_alike(groups: Sequence[Mapping[str, Any]], rule: OptimizerSettings) -> None:
    """Raise InputError if an optimizer with ``rule`` updates these groups as one, and they have other numbers now."""
    if traits_of(rule).adds_up and any(group != groups[0] for group in groups):
        raise InputError(
            f"Trainer.optimizer: its groups have got different numbers, and {rule.optimizer} adds up over all of them; "
            "give them the same"
        )


def _left_out(names: Collection[str]) -> ParameterGroup:
    return ParameterGroup(
        names=tuple(sorted(names)), optimizer="sgd", learning_rate=0.0, weight_decay=0.0, script_group=LEFT_OUT
    )


def _highest_rate(group: Mapping[str, Any]) -> Any:
    return _plain(group.get("initial_lr", group.get("lr")))


def _arguments(optimizer: torch.optim.Optimizer, group: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments with which the class of ``optimizer`` makes such a ``group``, beside its settings."""
    kind, again = type(optimizer), _made_again(optimizer, group)
    other = again.param_groups[0]
    own = other if kind.__module__.startswith("torch.optim.") else {**other, **group}  # torch's read no further entries
    unsaid = [name for name in own if name not in ("params", "lr", *_CHOSEN, *_ADDED)]
    unsaid = [name for name in unsaid if not _are_equal(group.get(name), other.get(name))]
    before, after = attributes_of(optimizer), attributes_of(again)
    if averages(kind):  # the pipeline decides which weights it has
        unsaid = [name for name in unsaid if name not in _switched(again)]
        before, after = (
            {name: text for name, text in texts.items() if name not in _switched(again)} for texts in (before, after)
        )
    added = (*_OF_SCHEDULE, *_OF_TRAINER)
    unsaid += [name for name in {**before, **after} if name not in added and before.get(name) != after.get(name)]
    if unsaid:
        rest = [f"**{entry.name}" for entry in _arguments_of(kind).values() if entry.kind is entry.VAR_KEYWORD]
        advice = "keep its arguments in its groups by their names"
        if rest:
            advice = f"give its constructor named arguments in place of {rest[0]}, which does not say what it takes"
        raise InputError(
            f"Trainer: its optimizer has another {unsaid[0]} than a {kind.__name__} that is made with what its groups "
            f"say, so the ranks cannot make it again; {advice}"
        )
    defaults = {name: parameter.default for name, parameter in _arguments_of(kind).items()}
    return {
        name: value
        for name, value in _given(kind, group).items()
        if name not in ("lr", "weight_decay") and not _are_equal(value, defaults[name])
    }


@trying()
def _check_groups_alone(optimizer: torch.optim.Optimizer) -> None:
    """Raise InputError if a step on one group depends on another, or on what all groups began with.

    Ranks make an optimizer for each group. Each group is tried with other numbers, as schedules may set them.
    """
    kind, groups = type(optimizer), optimizer.param_groups
    if kind.__module__.startswith("torch.optim."):
        return
    given = [_scaled(_given(kind, group), 1 - 0.1 * place / len(groups)) for place, group in enumerate(groups)]
    common = _given(kind, optimizer.defaults)
    weights = [nn.Parameter(torch.linspace(0.5, 1.5, 6).view(2, 3)) for _ in range(2 * len(given))]
    pairs = list(zip(weights[::2], weights[1::2], given, strict=True))
    try:
        together = make_optimizer(kind, [{"params": [weight], **arguments} for weight, _, arguments in pairs], common)
        apart = [make_optimizer(kind, [other], arguments) for _, other, arguments in pairs]
        for step in range(1, 4):
            for number, (weight, other, _) in enumerate(pairs):
                weight.grad = torch.linspace(-1, number + step, 6).view(2, 3)
                other.grad = weight.grad.clone()
            for made in (together, *apart):
                made.step()
    except Exception:  # traits_of says what is wrong with such a class
        return
    if not all(torch.equal(weight, other) for weight, other, _ in pairs):
        raise InputError(
            f"Trainer: its optimizer, a {kind.__name__}, updates a group by what another one says, or by its defaults; "
            "ranks make an optimizer for each group: read what a group says from that group"
        )


def _made_again(optimizer: torch.optim.Optimizer, group: Mapping[str, Any]) -> torch.optim.Optimizer:
    """An optimizer of the same class and with the arguments that ``group`` says, of a small parameter."""
    kind = type(optimizer)
    try:
        return make_optimizer(kind, [nn.Parameter(torch.zeros(2, 2))], _given(kind, group))
    except Exception as error:  # a class may raise anything
        raise InputError(f"Trainer: {kind.__name__} refuses what its groups hold: {error}") from None


def _switched(optimizer: torch.optim.Optimizer) -> set[str]:
    """What ``optimizer``, which averages, changes in its groups and attributes where it switches its weights."""
    said: list[dict[str, str]] = []
    for evaluation in (True, False):
        with suppress(Exception):  # traits_of says what is wrong with such a class
            use_weights(optimizer, evaluation=evaluation)
        options = {name: repr(value) for name, value in optimizer.param_groups[0].items() if name != "params"}
        said.append(options | attributes_of(optimizer))
    return {name for name, text in said[0].items() if text != said[1].get(name)}


def _given(kind: type[torch.optim.Optimizer], group: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of ``kind`` that ``group`` holds."""
    names = [name for name in _arguments_of(kind) if name not in ("params", *_CHOSEN, *_REFUSED)]
    return {name: _plain(group[name]) for name in names if name in group}


def _has_learnt(optimizer: torch.optim.Optimizer) -> bool:
    """Whether its state is another than a new optimizer's; some classes, such as Adagrad, make it at once."""
    if isinstance(optimizer.state, StateOnRanks):
        return optimizer.state.has_learnt
    new: dict[str, Any] = next(iter(_made_again(optimizer, optimizer.param_groups[0]).state.values()), {})
    numbers = {key: _plain(value) for key, value in new.items() if _is_number(_plain(value))}
    return any(
        set(state) != set(new) or any(not _are_equal(state[key], value) for key, value in numbers.items())
        for state in optimizer.state.values()
    )


def _scaled(value: Any, factor: float) -> Any:
    """``value`` with all of its floating-point numbers multiplied."""
    if isinstance(value, dict):
        return {name: _scaled(entry, factor) for name, entry in value.items()}
    if isinstance(value, tuple):
        return tuple(_scaled(entry, factor) for entry in value)
    return value * factor if isinstance(value, float) else value


def _plain(value: Any) -> Any:
    """A number in place of a tensor of one element or a number of numpy; tuples for lists."""
    if isinstance(value, np.generic) or (isinstance(value, torch.Tensor) and value.numel() == 1):
        return value.item()
    if isinstance(value, np.ndarray):
        return tuple(value.tolist())
    return tuple(map(_plain, value)) if isinstance(value, list | tuple) else value


def _are_equal(value: Any, other: Any) -> bool:
    value, other = _plain(value), _plain(other)
    if isinstance(value, torch.Tensor) or isinstance(other, torch.Tensor):
        return isinstance(value, torch.Tensor) and isinstance(other, torch.Tensor) and torch.equal(value, other)
    return bool(value == other)


def _is_number(value: Any) -> bool:
    if isinstance(value, tuple):
        return all(map(_is_number, value))
    return isinstance(value, int | float) and not isinstance(value, bool)
