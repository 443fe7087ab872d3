"""A user's module as the ``build`` function and the initial state that a capture and its ranks need."""

import copy
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import suppress
from typing import Any
from unittest.mock import patch

import torch
from torch import nn
from torch.nn.modules import module as torch_module
from transformers import PreTrainedModel

from auto3d.capture.block_state import OF_EVERY_MODULE
from auto3d.capture.empty import EmptyModel, empty_model
from auto3d.capture.export import InputSpec, quiet_torch
from auto3d.capture.held import buffers_of
from auto3d.capture.repeats import HOOKS
from auto3d.capture.skeleton import keep_gradient_hooks
from auto3d.errors import InputError


def build_of(model: nn.Module) -> Callable[[], nn.Module]:
    """A function that makes a module like ``model``: its values if it has none yet, else no values.

    A module on the meta device is made again from its config, so that it must be a PreTrainedModel. Any other is copied
    around its parameters, whose memory the copy does not touch. Where none of its parameters is trained, which is for
    an evaluation, all are in the modules. Raises InputError for what cannot be trained so.
    """
    if isinstance(model, nn.DataParallel | nn.parallel.DistributedDataParallel):
        raise InputError(f"model: it is a {type(model).__name__}, and a pipeline divides the work; give its .module")
    for name, parameter in model.named_parameters():
        if parameter.is_floating_point() and parameter.dtype != torch.float32:
            raise InputError(
                f"model: {name} is {str(parameter.dtype).removeprefix('torch.')}; a pipeline trains parameters of "
                "float32: load the model with dtype=torch.float32"
            )
    if getattr(model, "is_activation_checkpointing", False):
        raise InputError(
            "model: gradient checkpointing is enabled in it; call model.gradient_checkpointing_disable(), and give "
            'auto3d.init(recompute="full")'
        )
    on_meta = [parameter.is_meta for parameter in model.parameters()]
    if not any(on_meta):
        return lambda: _without_cache(_with_trained(_like(model)))
    if not all(on_meta) or not isinstance(model, PreTrainedModel):
        problem = "only some of its parameters are" if not all(on_meta) else "it is no PreTrainedModel, and so it is"
        raise InputError(
            f"model: {problem} on the meta device without values; build it on the CPU, or a PreTrainedModel from its "
            "config under torch.device('meta')"
        )
    kind, config = type(model), model.config
    trains = {name: parameter.requires_grad for name, parameter in model.named_parameters()}

    def build() -> nn.Module:
        made: nn.Module = kind._from_config(copy.deepcopy(config))
        for name, parameter in made.named_parameters():
            parameter.requires_grad_(trains[name])
        return _without_cache(_with_trained(made))

    return build


def traits_of(model: nn.Module) -> Iterator[tuple[str, object]]:
    """(name, value) of all but the values of ``model`` that a script may change, and that a pipeline has taken from it:
    its modules with their attributes and hooks, its parameters and which of them are trained, numbers of its
    configuration."""
    config = getattr(model, "config", None)
    for name, value in vars(config).items() if config is not None else ():
        if isinstance(value, int | float):  # save_pretrained itself writes others
            yield f"model.config.{name}", value
    for name, parameter in model.named_parameters():
        yield f"requires_grad of {name}", parameter.requires_grad
        yield f"the memory of {name}", (id(parameter), parameter.data_ptr())
        of_gradient = parameter._backward_hooks, getattr(parameter, "_post_accumulate_grad_hooks", None)
        yield f"gradient hooks of {name}", _hooks(of_gradient)
    yield "hooks of all modules", _hooks(getattr(torch_module, f"_global{kind}") for kind in HOOKS)
    for place, module in model.named_modules():
        name = f"model.{place}" if place else "model"
        yield name, (id(module), type(module))
        yield f"hooks of {name}", _hooks(getattr(module, kind) for kind in HOOKS)
        for key, value in vars(module).items():
            if key not in OF_EVERY_MODULE:
                yield f"{name}.{key}", _trait(value)


def _hooks(of_kinds: Iterable[Mapping[int, Any] | None]) -> list[list[int]]:
    """Which hooks there are, by kind."""
    return [[id(hook) for hook in (hooks or {}).values()] for hooks in of_kinds]


def run_without_values(model: EmptyModel, inputs: Mapping[str, InputSpec], **further: Any) -> Any:
    """What a forward of ``model`` makes of two samples. Raises what its code does where it needs values.

    Code that does not run so, such as a choice of experts, is tried as torch.compile would run it.
    """
    arguments = {name: model.zeros((2, *spec.shape), spec.dtype) for name, spec in inputs.items()}
    padded = patch.object(torch.backends.mha, "get_fastpath_enabled", lambda: False)  # nested tensors need values
    with torch.no_grad(), model.mode, padded, quiet_torch():
        try:
            return model.module(**arguments, **further)
        except Exception:
            with patch.object(torch.compiler, "is_compiling", lambda: True):
                return model.module(**arguments, **further)


def kept_by_forward(build: Callable[[], nn.Module], inputs: Mapping[str, InputSpec], *, device: str) -> set[str]:
    """Names of the attributes that a forward of the module that ``build`` makes gives another value.

    A pipeline runs it in other modules, so a script that reads them sees the values from before.
    """
    model = empty_model(build, device)
    model.module.train()

    def attributes() -> dict[tuple[str, str], int]:
        return {
            (place, name): id(value)
            for place, module in model.module.named_modules()
            for name, value in vars(module).items()
            if name not in OF_EVERY_MODULE
        }

    before = attributes()
    with suppress(Exception):  # code that needs values has none here
        run_without_values(model, inputs)
    return {name for (place, name), value in attributes().items() if before.get((place, name)) != value}


_PLAIN = (bool, int, float, str, type(None))


def _trait(value: Any) -> object:
    """Something that is equal for equal values of an attribute; of an object, only which one it is."""
    if isinstance(value, _PLAIN):
        return type(value), value
    if isinstance(value, torch.Tensor):
        return id(value), value._version
    items = [*value.items()] if isinstance(value, dict) else value
    if isinstance(items, list | tuple | set) and all(isinstance(item, (*_PLAIN, tuple)) for item in items):
        return repr(value)
    return id(value)


def check_reached(model: nn.Module, constants: Mapping[str, torch.Tensor]) -> None:
    """Raise InputError if one of ``constants``, of the capture of a copy, is a parameter or buffer of ``model`` itself.

    So it is where a hook or a replaced forward refers to the script's model: a pipeline would not train it there.
    """
    memory = {tensor.data_ptr(): name for name, tensor in (state_of(model) or {}).items() if tensor.numel()}
    for value in constants.values():
        if not value.is_meta and value.data_ptr() in memory:
            raise InputError(
                f"model: a hook or a replaced forward takes {memory[value.data_ptr()]} from the model of the script, "
                "where a pipeline would not train it; take it from the module that the function is called with"
            )


def state_of(model: nn.Module) -> dict[str, torch.Tensor] | None:
    """The values of the parameters and buffers of ``model``; None if it is on the meta device."""
    if any(parameter.is_meta for parameter in model.parameters()):
        return None
    return {name: tensor.detach() for name, tensor in [*buffers_of(model).items(), *model.named_parameters()]}


def _with_trained(model: nn.Module) -> nn.Module:
    """``model``, all of whose parameters are trained if none is: a pipeline is cut for training, which may not come."""
    parameters = [weight for weight in model.parameters() if weight.is_floating_point()]
    for parameter in [] if any(weight.requires_grad for weight in parameters) else parameters:
        parameter.requires_grad_(True)
    return model


def _without_cache(model: nn.Module) -> nn.Module:
    """``model``, whose forward keeps no past keys and values; training never uses them, and they are no tensors.

    transformers says so in the configuration of the whole model; a decoder in it may have its own.
    """
    for part in model.modules():
        config = getattr(part, "config", None)
        if config is not None and getattr(config, "use_cache", False) is True:
            config.use_cache = False
    return model


def separate(state: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """``state`` with contiguous tensors that share no memory, as files of safetensors have them."""
    separated, memory = {}, set[int]()
    for name, tensor in state.items():
        storage = tensor.untyped_storage().data_ptr()
        is_own = tensor.is_contiguous() and storage not in memory
        separated[name] = tensor if is_own else tensor.clone(memory_format=torch.contiguous_format)
        memory.add(storage)
    return separated


def _like(model: nn.Module) -> nn.Module:
    """A copy of ``model`` whose parameters have no values. Their memory is untouched, so it takes none yet."""
    stand_ins: dict[int, Any] = {
        id(parameter): nn.Parameter(torch.empty(parameter.shape, dtype=parameter.dtype), parameter.requires_grad)
        for parameter in model.parameters()
    }
    for parameter in model.parameters():
        keep_gradient_hooks(parameter, stand_ins[id(parameter)])
    if not _is_copied(model, stand_ins):
        _stand_in(model, stand_ins, set())
    return copy.deepcopy(model, stand_ins)


def _stand_in(value: Any, stand_ins: dict[int, object], seen: set[int]) -> None:
    """Enter into ``stand_ins`` what deepcopy cannot copy of ``value``, such as a lock: the copy shares it.

    It copies no tensor that an operation has made; old weight norms and masks of pruning hold some, and so does a model
    that keeps an output. For such a tensor its values stand in.
    """
    if id(value) in seen or _is_copied(value, stand_ins):
        return
    seen.add(id(value))
    if isinstance(value, torch.Tensor):
        stand_ins[id(value)] = value.detach().clone()
        return
    items = value.values() if isinstance(value, Mapping) else value if isinstance(value, Collection) else ()
    for part in [*items, *getattr(value, "__dict__", {}).values()]:
        _stand_in(part, stand_ins, seen)
    if not _is_copied(value, stand_ins):
        stand_ins[id(value)] = value


def _is_copied(value: Any, stand_ins: Mapping[int, object]) -> bool:
    try:
        copy.deepcopy(value, dict(stand_ins))
    except Exception:  # a class may define how it is copied, and raise what it likes
        return False
    return True
