"""The user's callbacks: they see the weights, the rate and the arguments of the step, and must not change them.

A pipeline trains weights of its own, by settings that it took before its first iteration.
"""

from collections.abc import Iterable, Iterator
from inspect import unwrap
from types import CodeType, FunctionType
from typing import Any

import torch
from torch import nn
from transformers.trainer_callback import CallbackHandler

from auto3d.errors import InputError
from auto3d.trainer.instance import traits_of
from auto3d.trainer.pipeline import Pipeline
from auto3d.trainer.supported import own_events

_OURS = ("transformers.", "auto3d.")
_AFTER = ("on_train_end",)  # nothing is trained any more


def name_of(callback: Any) -> str:
    return f"{type(callback).__module__}.{type(callback).__name__}"


def is_users(callback: Any) -> bool:
    return not name_of(callback).startswith(_OURS)


def events_with_weights(callbacks: Iterable[Any]) -> set[str]:
    """The events of the user's ``callbacks`` that may look at the model: they hold it, or their code names it."""
    return {
        event
        for callback in callbacks
        if is_users(callback) and (_holds_a_model(callback) or {"model", "trainer"} & _words_of(type(callback)))
        for event in own_events(type(callback))
    }


def _holds_a_model(callback: Any) -> bool:
    return any(isinstance(value, nn.Module) for value in vars(callback).values())


def _words_of(kind: type) -> set[str]:
    """The names and the texts in the code of the user's classes that make up ``kind``."""
    codes = [
        function.__code__
        for one in kind.__mro__
        if not one.__module__.startswith((*_OURS, "builtins"))
        for function in map(unwrap, filter(callable, vars(one).values()))
        if isinstance(function, FunctionType)
    ]
    words = set[str]()
    while codes:
        code = codes.pop()
        words |= {*code.co_varnames, *code.co_names, *(each for each in code.co_consts if isinstance(each, str))}
        codes += [each for each in code.co_consts if isinstance(each, CodeType)]
    return words


class PipelineCallbacks(CallbackHandler):
    """``handler``, which gathers the weights of ``pipeline`` into the model before the events ``with_weights``.

    Raises InputError where a callback of the user's changes what the pipeline would not follow.
    """

    def __init__(self, handler: CallbackHandler, pipeline: Pipeline) -> None:
        self.__dict__ |= vars(handler)
        self._pipeline = pipeline
        self.with_weights: set[str] = set()  # the same on every rank

    def call_event(self, event: str, args: Any, state: Any, control: Any, **named: Any) -> Any:
        if event in self.with_weights:
            self._pipeline.gather()
        users = [one for one in self.callbacks if is_users(one) and event in own_events(type(one))]
        if not users or event in _AFTER:
            return super().call_event(event, args, state, control, **named)
        before = dict(self._followed(args))
        control = super().call_event(event, args, state, control, **named)
        for what, value in self._followed(args):
            if before.get(what, value) != value:
                kinds = " or ".join(dict.fromkeys(type(one).__name__ for one in users))
                raise InputError(
                    f"callbacks: {kinds}.{event}: it changed {what} during the training, which a pipeline cannot "
                    "follow; change it before train()"
                )
        return control

    def _followed(self, args: Any) -> Iterator[tuple[str, Any]]:
        """(name, value) of all that a change of would be without effect."""
        for name, value in vars(args).items():
            yield f"args.{name}", value
        model: nn.Module = self.model
        yield from traits_of(model)
        for name, parameter in model.named_parameters():
            yield f"the values of {name}", parameter._version - self._pipeline.gathered
        for name, buffer in model.named_buffers():
            if not buffer.is_meta:
                yield f"the values of {name}", torch.hash_tensor(buffer).item()
        for number, group in enumerate(self.optimizer.param_groups if self.optimizer is not None else ()):
            yield f"the learning rate of optimizer.param_groups[{number}]", group["lr"]
