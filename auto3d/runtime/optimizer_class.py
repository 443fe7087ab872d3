"""Which class of optimizer a training uses, with which arguments; refuses those that it cannot run exactly."""

import inspect
from functools import cache
from importlib import import_module
from typing import Any

import torch
from torch import nn

from auto3d.errors import InputError
from auto3d.runtime.settings import OPTIMIZERS, OptimizerSettings

# Each element's update depends on that element of the weight, its gradient and its state alone, so any rank may update
# any slice of a weight. Adafactor and Muon mix the elements of a weight.
ELEMENTWISE = frozenset(
    getattr(torch.optim, name)
    for name in ["Adadelta", "Adagrad", "Adam", "AdamW", "Adamax", "ASGD", "NAdam", "RAdam", "RMSprop", "Rprop", "SGD"]
)
FUSED = frozenset({torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD})  # those with one kernel for all parameters
_OURS = {  # argument -> what sets it
    "params": "the model",
    "lr": "training.learning_rate",
    "weight_decay": "training.weight_decay",
    "capturable": "CUDA graphs, which are not used",
    "differentiable": "nothing: updates have no gradients",
    "foreach": "the device",
    "fused": "the device",
}
_PROBE_SCALES = (1.0, 1e-3, 1e3, 1.0, 0.1, 10.0, 1.0, 1.0)  # one factor of the gradients for each step


def optimizer_class(settings: OptimizerSettings) -> tuple[type[torch.optim.Optimizer], dict[str, Any]]:
    """The class of ``settings`` and its arguments. Raises InputError if it cannot be used, before any training."""
    kind, arguments = _class_and_arguments(settings)
    _check(settings, kind, arguments)
    return kind, arguments


def is_elementwise(settings: OptimizerSettings) -> bool:
    """Whether a rank may update any slice of a weight alone."""
    return _class_and_arguments(settings)[0] in ELEMENTWISE


def _class_and_arguments(settings: OptimizerSettings) -> tuple[type[torch.optim.Optimizer], dict[str, Any]]:
    options: dict[str, Any] = {"lr": settings.learning_rate, "weight_decay": settings.weight_decay}
    kind: type[torch.optim.Optimizer]
    if settings.optimizer == "adamw":
        kind, options["betas"] = torch.optim.AdamW, settings.betas
    elif settings.optimizer == "sgd":
        kind, options["momentum"] = torch.optim.SGD, settings.momentum
    elif settings.optimizer == "adafactor":
        # transformers' class, with the options of its Trainer: torch's has no first moment and another update.
        from transformers.optimization import Adafactor  # takes each rank two seconds if nothing else needs it

        kind, options["scale_parameter"], options["relative_step"] = Adafactor, False, False
    else:
        kind = _imported(settings.optimizer)
        accepted = inspect.signature(kind).parameters
        if "lr" not in accepted:
            raise InputError(f"optimizer: {settings.optimizer} takes no argument lr, which the schedule sets")
        if "weight_decay" not in accepted:
            del options["weight_decay"]
            if settings.weight_decay:
                raise InputError(f"optimizer: {settings.optimizer} takes no weight_decay; use training.weight_decay=0")
    for name in settings.arguments:
        if name in _OURS:
            raise InputError(f"optimizer_arguments: {name} is not accepted; it is set by {_OURS[name]}")
    return kind, options | dict(settings.arguments)


@cache
def _imported(path: str) -> type[torch.optim.Optimizer]:
    module, _, name = path.rpartition(":" if ":" in path else ".")
    accepted = f"{', '.join(OPTIMIZERS)}, torch.optim.Class or package.module:Class"
    if not module or not name.isidentifier():
        raise InputError(f"optimizer: {path!r} is not known; use one of {accepted}")
    try:
        kind = getattr(import_module(module), name)
    except Exception as error:  # the user's module may raise anything
        line = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise InputError(f"optimizer: {path!r} cannot be imported: {line}; use one of {accepted}") from None
    if not (isinstance(kind, type) and issubclass(kind, torch.optim.Optimizer)):
        raise InputError(f"optimizer: {path!r} is no class of torch optimizers; use one of {accepted}")
    if callable(getattr(kind, "train", None)) and callable(getattr(kind, "eval", None)):
        raise InputError(f"optimizer: {path} has other weights in evaluation (train and eval), which no rank switches")
    closure = inspect.signature(kind.step).parameters.get("closure")
    if kind is torch.optim.LBFGS or (closure is not None and closure.default is inspect.Parameter.empty):
        raise InputError(f"optimizer: {path} runs the model again in its step (closure), which a pipeline cannot do")
    return kind


def _check(settings: OptimizerSettings, kind: type[torch.optim.Optimizer], arguments: dict[str, Any]) -> None:
    """Try the optimizer on small parameters: it must accept its arguments and update each parameter on its own."""
    name = settings.optimizer
    try:
        kind(_probes()[:1], **arguments)
    except Exception as error:  # a class may raise anything
        line = str(error).splitlines()[0] if str(error) else type(error).__name__
        accepted = ", ".join(each for each in inspect.signature(kind).parameters if each not in _OURS)
        raise InputError(f"optimizer_arguments: {name} refuses them: {line}; it accepts {accepted}") from None
    if kind in ELEMENTWISE:
        return
    try:
        together = kind(_probes(), **arguments)
        groups = [_numbers(group) for group in together.param_groups]
        after = _stepped(together)
        alone = [_stepped(kind([probe], **arguments))[0] for probe in _probes()]
    except Exception as error:
        line = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise InputError(f"optimizer: {name} cannot update dense parameters of 1 to 4 dimensions: {line}") from None
    if not all(torch.equal(one, other) for one, other in zip(after, alone, strict=True)):
        raise InputError(f"optimizer: {name} mixes its parameters, which are on several ranks; use another")
    if groups != [_numbers(group) for group in together.param_groups]:
        raise InputError(f"optimizer: {name} keeps numbers in its parameter groups, which checkpoints do not hold")
    for state in together.state.values():
        for key, value in state.items():
            if not isinstance(value, torch.Tensor | int | float | None):
                raise InputError(f"optimizer: {name} keeps a {type(value).__name__} ({key}), which checkpoints cannot")


def check_resumes(settings: OptimizerSettings) -> None:
    """Raise InputError if the optimizer keeps, besides its state, what a checkpoint does not hold."""
    kind, arguments = _class_and_arguments(settings)
    if kind in ELEMENTWISE:
        return
    optimizer = kind(_probes(), **arguments)
    before = _attributes(optimizer)
    _stepped(optimizer)
    after = _attributes(optimizer)
    if changed := sorted(name for name in after if before.get(name) != after[name]):
        raise InputError(
            f"optimizer: {settings.optimizer} counts in {changed[0]}, outside of its state, which checkpoints do not "
            "hold: a training that resumes would go on differently; keep it in the state of each parameter, or write "
            "no checkpoints"
        )


def _attributes(optimizer: torch.optim.Optimizer) -> dict[str, str]:
    """Its own attributes, without those of every torch optimizer."""
    common = vars(torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.1))
    return {name: repr(value) for name, value in vars(optimizer).items() if name not in common}


def _probes() -> list[nn.Parameter]:
    random = torch.Generator().manual_seed(0)
    shapes = [(6, 4), (5,), (3, 2, 2, 2)]
    return [nn.Parameter(torch.randn(shape, generator=random)) for shape in shapes]


def _stepped(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """The parameters after a few steps; each parameter has the same gradients in any optimizer."""
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    for step, scale in enumerate(_PROBE_SCALES):
        for parameter in parameters:
            random = torch.Generator().manual_seed(1 + step + 100 * parameter.numel())
            parameter.grad = scale * torch.randn(parameter.shape, generator=random)
        optimizer.step()
    return [parameter.detach() for parameter in parameters]


def _numbers(group: dict[str, Any]) -> dict[str, str]:
    return {key: repr(value) for key, value in group.items() if key != "params"}
