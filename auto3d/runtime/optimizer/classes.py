"""Which class of optimizer a training uses, with which arguments; refuses those that it cannot run exactly."""

import inspect
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass
from functools import cache, partial
from importlib import import_module
from io import StringIO
from typing import Any

import torch
from torch import nn

from auto3d.errors import InputError
from auto3d.runtime.optimizer.stand_ins import NumbersRead, stand_in
from auto3d.runtime.settings import MUON, OPTIMIZERS, OptimizerSettings

# Each element's update depends on that element of the weight, its gradient and its state alone, so any rank may update
# any slice of a weight. Adafactor and Muon mix the elements of a weight. Other classes are tried.
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
_PROBE_SHAPES = ((6, 4), (5,), (3, 2, 2, 2), (3, 4, 2))
# Larger than what factored and quantised states begin at. It is divided where a vector of any processor ends, but no
# block of 128 elements or more: some classes quantise each block by itself.
_LARGE_PROBE, _LARGE_PROBE_AT, _LARGE_PROBE_STEPS = (1024, 1040), 320_064, 3


@dataclass(frozen=True, kw_only=True)
class Traits:
    """What steps of an optimizer on small parameters have shown."""

    dimensions: frozenset[int]  # numbers of dimensions of the parameters that it updates
    counts: tuple[str, ...]  # numbers, of a parameter group or beside the state of parameters, that its steps change
    averages: bool = False  # whether evaluation has other weights than training
    adds_up: bool = False  # whether its steps need of other parameters only numbers, which they read


@contextmanager
def trying() -> Iterator[None]:
    """Try optimizers without what they print, and with steps that are not compiled.

    Without a pool of threads, too, which does not outlive a fork of ranks.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with redirect_stdout(StringIO()), torch.compiler.set_stance("force_eager"):
            yield
    finally:
        torch.set_num_threads(threads)


def averages(kind: type[torch.optim.Optimizer]) -> bool:
    """Whether evaluation has other weights than training, such as averages; ``eval`` and ``train`` switch to them.

    Schedule-free optimizers do (Defazio and others, 2024, "The road less scheduled", section 2).
    """
    return callable(getattr(kind, "eval", None)) and callable(getattr(kind, "train", None))


def make_optimizer(
    kind: type[torch.optim.Optimizer], parameters: Iterable[Any], arguments: Mapping[str, Any]
) -> torch.optim.Optimizer:
    """An optimizer of ``parameters``, or of groups of them, that is ready for steps."""
    optimizer = kind(parameters, **arguments)
    if averages(kind):
        use_weights(optimizer, evaluation=False)
    return optimizer


@torch.no_grad()
def use_weights(optimizer: Any, *, evaluation: bool) -> None:
    """Give the parameters of an ``optimizer`` that averages the weights of evaluation, or of training."""
    if evaluation:
        optimizer.eval()
    else:
        optimizer.train()


def optimizer_class(settings: OptimizerSettings) -> tuple[type[torch.optim.Optimizer], dict[str, Any]]:
    """The class of ``settings`` and its arguments. Raises InputError if it cannot be used, before any training."""
    traits_of(settings)
    return _class_and_arguments(settings)


def check_closure(kind: type[torch.optim.Optimizer], name: str) -> None:
    """Raise InputError if steps of ``kind`` run the model."""
    closure = inspect.signature(kind.step).parameters.get("closure")
    if kind is torch.optim.LBFGS or (closure is not None and closure.default is inspect.Parameter.empty):
        raise InputError(f"optimizer: {name} runs the model again in its step (closure), which a pipeline cannot do")


@cache
@trying()
def is_elementwise(settings: OptimizerSettings) -> bool:
    """Whether a rank may update any slice of a weight alone."""
    kind, arguments = _class_and_arguments(settings)
    if kind in ELEMENTWISE:
        return True
    if traits_of(settings).adds_up or not {1, 2} <= traits_of(settings).dimensions:
        return False
    small = [(shape, 2) for shape in _PROBE_SHAPES if len(shape) in traits_of(settings).dimensions]
    large = (_LARGE_PROBE, _LARGE_PROBE_AT)
    return all(_updates_slices_alone(kind, arguments, *probe) for probe in (*small, large))


def _updates_slices_alone(
    kind: type[torch.optim.Optimizer], arguments: dict[str, Any], shape: Sequence[int], middle: int
) -> bool:
    """Whether two slices of a parameter of ``shape``, cut at element ``middle``, are updated like the whole of it."""
    (whole,) = _probes([shape])
    parts = [nn.Parameter(part.clone()) for part in whole.detach().flatten().tensor_split([middle])]
    together = make_optimizer(kind, [whole], arguments)
    alone = [make_optimizer(kind, [part], arguments) for part in parts]
    scales = _PROBE_SCALES[:_LARGE_PROBE_STEPS] if shape == _LARGE_PROBE else _PROBE_SCALES
    for step, scale in enumerate(scales):
        whole.grad = _gradient(whole, step, scale)
        for part, gradient in zip(parts, whole.grad.flatten().tensor_split([middle]), strict=True):
            part.grad = gradient.clone()
        for optimizer in (together, *alone):
            optimizer.step()
    for evaluation in (False, True) if averages(kind) else (False,):
        for optimizer in (together, *alone) if evaluation else ():
            use_weights(optimizer, evaluation=True)
        if not torch.equal(whole.detach().flatten(), torch.cat([part.detach() for part in parts])):
            return False
    # A number that it finds of a whole weight may decide later what happens to each element.
    numbers = _numbers_kept(together.state[whole])
    return all(
        _numbers_kept(part_optimizer.state[part]) == numbers for part_optimizer, part in zip(alone, parts, strict=True)
    )


def _numbers_kept(state: dict[str, Any]) -> dict[str, float]:
    """The numbers, and tensors of one element, in the state of a parameter."""
    return {
        name: float(value)
        for name, value in ((kept.name, kept.value) for kept in kept_in(state))
        if isinstance(value, int | float) or (isinstance(value, torch.Tensor) and value.numel() == 1)
    }


@dataclass(frozen=True)
class Kept:
    """A value in the state of a parameter: ``place[key]``, where ``place`` is that state, or a list or dict in it."""

    name: str  # keys from the state on, such as "GG.0"
    value: Any
    place: Any
    key: Any


def kept_in(state: Mapping[str, Any]) -> Iterator[Kept]:
    """All that ``state`` of a parameter holds but None, with what its lists, tuples and dicts hold."""
    yield from _kept_in(state, state.items(), "")


def _kept_in(place: Any, items: Iterable[tuple[Any, Any]], prefix: str) -> Iterator[Kept]:
    for key, value in items:
        if type(value) is dict:
            yield from _kept_in(value, value.items(), f"{prefix}{key}.")
        elif type(value) in (list, tuple):
            yield from _kept_in(value, enumerate(value), f"{prefix}{key}.")
        elif value is not None:
            yield Kept(f"{prefix}{key}", value, place, key)


def _class_and_arguments(settings: OptimizerSettings) -> tuple[type[torch.optim.Optimizer], dict[str, Any]]:
    options: dict[str, Any] = {"lr": settings.learning_rate, "weight_decay": settings.weight_decay}
    kind: type[torch.optim.Optimizer]
    if settings.optimizer == "adamw":
        kind, options["betas"] = torch.optim.AdamW, settings.betas
    elif settings.optimizer == "sgd":
        kind, options["momentum"] = torch.optim.SGD, settings.momentum
    elif settings.optimizer == MUON:
        # The scale that gives its updates the size of AdamW's, so that one learning rate serves both (J. Liu and
        # others, 2025, "Muon is scalable for LLM training", section 2.2).
        kind, options["adjust_lr_fn"] = torch.optim.Muon, "match_rms_adamw"
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
                raise InputError(f"optimizer: {settings.optimizer} takes no weight_decay; give it a weight_decay of 0")
    for name in settings.arguments:
        if name in _OURS:
            raise InputError(f"optimizer_arguments: {name} is not accepted; it is set by {_OURS[name]}")
    return kind, options | dict(settings.arguments)


def import_path(kind: type[torch.optim.Optimizer]) -> str:
    """The path by which settings name ``kind``. Raises InputError for a class that it does not find again."""
    module = "torch.optim" if getattr(torch.optim, kind.__name__, None) is kind else kind.__module__
    path = f"{module}{'.' if module == 'torch.optim' else ':'}{kind.__name__}"
    if "." in kind.__qualname__ or _imported(path) is not kind:
        raise InputError(f"optimizer: {kind.__qualname__} is a class inside another scope; define it in a module")
    return path


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
    check_closure(kind, path)
    return kind


@cache
@trying()
def traits_of(settings: OptimizerSettings) -> Traits:
    """Try the optimizer on small parameters: it must accept its arguments and update each parameter on its own.

    Raises InputError if it does not, or keeps what checkpoints cannot hold.
    """
    name = settings.optimizer
    kind, arguments = _class_and_arguments(settings)
    try:
        kind(_probes(_PROBE_SHAPES[:1]), **arguments)
    except Exception as error:  # a class may raise anything
        accepted = ", ".join(argument for argument in inspect.signature(kind).parameters if argument not in _OURS)
        raise InputError(f"optimizer_arguments: {name} refuses them: {_line(error)}; it accepts {accepted}") from None
    if kind in ELEMENTWISE:
        return Traits(dimensions=frozenset(map(len, _PROBE_SHAPES)), counts=())
    try:
        _stepped(make_optimizer(kind, _probes(_PROBE_SHAPES[:1]), arguments))
    except Exception as error:
        raise InputError(f"optimizer: {name} cannot update dense matrices: {_line(error)}") from None
    shapes = [shape for shape in _PROBE_SHAPES if _can_update(kind, arguments, shape)]
    together = make_optimizer(kind, _probes(shapes), arguments)
    alone = [make_optimizer(kind, _probes([shape]), arguments) for shape in shapes]
    before = _numbers(together)
    try:
        after = _stepped(together)
    except Exception as error:
        raise InputError(f"optimizer: {name} cannot update parameters of several shapes: {_line(error)}") from None
    mixes = not all(torch.equal(weight, _stepped(other)[0]) for weight, other in zip(after, alone, strict=True))
    if averages(kind) and not mixes:
        of_evaluation = _in_evaluation(together)
        mixes = not all(
            torch.equal(weight, _in_evaluation(other)[0]) for weight, other in zip(of_evaluation, alone, strict=True)
        )
    depends = any(_numbers(other) != _numbers(together) for other in alone)
    adds_up = (mixes or depends) and not averages(kind) and _adds_up(kind, arguments, shapes)
    if mixes and not adds_up:
        raise InputError(f"optimizer: {name} mixes its parameters, which are on several ranks; use another")
    if averages(kind) and not _can_go_on_from_evaluation(kind, arguments, shapes):
        raise InputError(
            f"optimizer: {name} keeps more than the state of its parameters where it switches to the weights of "
            "evaluation (eval and train), so that no other rank could switch back; use another"
        )
    # What is added up may change later than in these few steps.
    later = set(together.param_groups[0]) - set(inspect.signature(kind).parameters) if adds_up else set()
    counts = tuple(key for key, value in _numbers(together).items() if before.get(key) != value or key in later)
    if depends and not adds_up:
        raise InputError(
            f"optimizer: {name} keeps numbers that depend on all parameters, which are on several ranks; use another"
        )
    for key in counts:
        _check_kept(name, key, place_of(together, key)[key], (int, float, torch.Tensor))
    for kept in (kept for _, state in _states(together) for kept in kept_in(state)):
        can_be_replaced = not isinstance(kept.place, tuple)
        _check_kept(name, kept.name, kept.value, (int, float, torch.Tensor) if can_be_replaced else (torch.Tensor,))
    return Traits(dimensions=frozenset(map(len, shapes)), counts=counts, averages=averages(kind), adds_up=adds_up)


def _adds_up(kind: type[torch.optim.Optimizer], arguments: dict[str, Any], shapes: Sequence[Sequence[int]]) -> bool:
    """Whether an optimizer with stand-ins for some parameters updates the others right if it reads the right numbers.

    Then ranks with some parameters each can update them: see auto3d/runtime/optimizer/stand_ins.py.
    """
    whole, read = make_optimizer(kind, _probes(shapes), arguments), list[Any]()

    def noted(value: torch.Tensor) -> Any:
        read.append(value.item())
        return read[-1]

    with NumbersRead(noted):
        expected = _stepped(whole)
    had = [False] * len(read)  # whether one of two ranks has the value of each number
    for first in (0, 1):
        own = [place % 2 == first for place in range(len(shapes))]
        pairs = zip(_probes(shapes), own, strict=True)
        again = enumerate(read)
        try:
            some = make_optimizer(kind, [probe if has else stand_in(probe.shape) for probe, has in pairs], arguments)
            with NumbersRead(partial(_next, again, had)):
                updated = _stepped(some)
        except Exception:  # a class may compute with values of all parameters, or read other numbers
            return False
        if next(again, None) is not None or _numbers(some) != _numbers(whole):
            return False
        if not all(
            torch.equal(weight, other) for weight, other, has in zip(expected, updated, own, strict=True) if has
        ):
            return False
    return all(had)


def _next(again: Iterator[tuple[int, Any]], had: list[bool], value: torch.Tensor) -> Any:
    """The next number of ``again``, which ``value`` has unless it is without values; notes whether it ``had`` it."""
    place, number = next(again)
    if not value.is_meta:
        had[place] = True
        if repr(value.item()) != repr(number):
            raise ValueError("it depends on values of other parameters")
    return number


def place_of(optimizer: torch.optim.Optimizer, count: str) -> dict[Any, Any]:
    """Where ``optimizer`` of one group holds this key of its ``Traits.counts``: in the group, or beside the state."""
    (group,) = optimizer.param_groups
    return group if count in group else optimizer.state


def _states(optimizer: torch.optim.Optimizer) -> Iterator[tuple[torch.Tensor, dict[str, Any]]]:
    """Each parameter of ``optimizer`` that has state, with it."""
    return ((key, state) for key, state in optimizer.state.items() if isinstance(key, torch.Tensor))


def _check_kept(name: str, key: str, value: Any, kinds: tuple[type, ...]) -> None:
    """Raise InputError for a value that a checkpoint cannot hold."""
    if not isinstance(value, kinds):
        raise InputError(f"optimizer: {name} keeps a {type(value).__name__} ({key}), which checkpoints cannot")


def _can_update(kind: type[torch.optim.Optimizer], arguments: dict[str, Any], shape: Sequence[int]) -> bool:
    try:
        _stepped(make_optimizer(kind, _probes([shape]), arguments))
    except Exception:  # it is tried on parameters of every number of dimensions, and may refuse some
        return False
    return True


def _line(error: Exception) -> str:
    return str(error).splitlines()[0] if str(error) else type(error).__name__


def check_resumes(rules: Iterable[OptimizerSettings]) -> None:
    """Raise InputError if any of these optimizers keeps, besides its state, what a checkpoint does not hold."""
    for rule in dict.fromkeys(rules):
        _check_resumes(rule)


@trying()
def _check_resumes(settings: OptimizerSettings) -> None:
    kind, arguments = _class_and_arguments(settings)
    if kind in ELEMENTWISE:
        return
    dimensions = traits_of(settings).dimensions
    probes = _probes([shape for shape in _PROBE_SHAPES if len(shape) in dimensions])
    optimizer = make_optimizer(kind, probes, arguments)
    before = attributes_of(optimizer)
    _step(optimizer, 0, 1.0)
    first = _kept(optimizer)
    for step, scale in enumerate(_PROBE_SCALES[1:], 1):
        _step(optimizer, step, scale)
    if late := sorted(set(_kept(optimizer)) ^ set(first)):
        raise InputError(
            f"optimizer: {settings.optimizer} keeps {late[0][1]} in some steps only, so a training that resumes would "
            "go on without it; keep it from the first step on, or write no checkpoints"
        )
    after = attributes_of(optimizer)
    if changed := sorted(name for name in after if before.get(name) != after[name]):
        raise InputError(
            f"optimizer: {settings.optimizer} counts in {changed[0]}, outside of its state, which checkpoints do not "
            "hold: a training that resumes would go on differently; keep it in the state of each parameter, or write "
            "no checkpoints"
        )


def attributes_of(optimizer: torch.optim.Optimizer) -> dict[str, str]:
    """Its own attributes, without what every torch optimizer has."""
    return {name: repr(value) for name, value in vars(optimizer).items() if name not in _common_attributes()}


@cache
def _common_attributes() -> frozenset[str]:
    return frozenset(vars(torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.1)))


def _probes(shapes: Sequence[Sequence[int]]) -> list[nn.Parameter]:
    return [nn.Parameter(torch.randn(shape, generator=torch.Generator().manual_seed(0))) for shape in shapes]


def _stepped(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """The parameters after a few steps; each parameter has the same gradients in any optimizer."""
    for step, scale in enumerate(_PROBE_SCALES):
        _step(optimizer, step, scale)
    return _values(optimizer)


def _can_go_on_from_evaluation(
    kind: type[torch.optim.Optimizer], arguments: dict[str, Any], shapes: Sequence[Sequence[int]]
) -> bool:
    """Whether a new optimizer that gets the weights of evaluation, with all state, has the same weights in training."""
    try:
        fresh = make_optimizer(kind, _probes(shapes), arguments)
        before = [value.clone() for value in _values(fresh)]
        if not all(map(torch.equal, before, _in_evaluation(fresh))):
            return False  # it would change weights before a step
        source, other = (make_optimizer(kind, _probes(shapes), arguments) for _ in range(2))
        _stepped(source)
        use_weights(source, evaluation=True)
        _step(other, 0, 1.0)
        if _kept(source) != _kept(other):
            return False
        _copy(source, other)
        use_weights(other, evaluation=True)
        for mine, parameter in zip(_values(source), _values(other), strict=True):
            parameter.copy_(mine)
        for optimizer in (source, other):
            use_weights(optimizer, evaluation=False)
        return all(map(torch.equal, _values(source), _values(other)))
    except Exception:  # a class may raise anything, such as where it has made no step
        return False


def _copy(source: torch.optim.Optimizer, other: torch.optim.Optimizer) -> None:
    """Give ``other`` the numbers and the state of ``source``, as a checkpoint would; no flags: they say its weights."""
    for mine, group in zip(source.param_groups, other.param_groups, strict=True):
        group.update({key: value for key, value in mine.items() if key != "params" and not isinstance(value, bool)})
    for (_, mine), (_, state) in zip(_states(source), _states(other), strict=True):
        for from_it, to in zip(kept_in(mine), list(kept_in(state)), strict=True):
            if isinstance(to.value, torch.Tensor):
                to.value.copy_(from_it.value)
            else:
                to.place[to.key] = from_it.value


def _in_evaluation(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """The weights of evaluation; afterwards the parameters have the weights of training again."""
    use_weights(optimizer, evaluation=True)
    values = [value.clone() for value in _values(optimizer)]
    use_weights(optimizer, evaluation=False)
    return values


def _values(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    return [parameter.detach() for group in optimizer.param_groups for parameter in group["params"]]


def _step(optimizer: torch.optim.Optimizer, step: int, scale: float) -> None:
    for parameter in (parameter for group in optimizer.param_groups for parameter in group["params"]):
        parameter.grad = _gradient(parameter, step, scale)
    optimizer.step()


def _kept(optimizer: torch.optim.Optimizer) -> list[tuple[int, str]]:
    """The number of a parameter, and the name of what is kept of it, for all that a checkpoint would hold."""
    return [(number, kept.name) for number, (_, state) in enumerate(_states(optimizer)) for kept in kept_in(state)]


def _gradient(parameter: torch.Tensor, step: int, scale: float) -> torch.Tensor:
    random = torch.Generator().manual_seed(1 + step + 100 * parameter.numel())
    return (scale * torch.randn(parameter.shape, generator=random)).to(parameter.device)


def _numbers(optimizer: torch.optim.Optimizer) -> dict[str, str]:
    """What it holds beside parameters and their state, in its groups or elsewhere, as text."""
    held = {key: value for group in optimizer.param_groups for key, value in group.items() if key != "params"}
    held |= {str(key): value for key, value in optimizer.state.items() if not isinstance(key, torch.Tensor)}
    return {key: repr(value) for key, value in held.items()}
