"""The user's callbacks: they see and change the weights and the rate of the step, and what is trained.

A pipeline trains weights of its own, by settings that it took before its first iteration. So what a callback changes is
found after its event, and the pipeline follows, or the change is refused.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import DataDependentOutputException, UnsupportedFakeTensorException
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode
from transformers.trainer_callback import CallbackHandler
from xxhash import xxh3_64_intdigest

from auto3d.errors import InputError
from auto3d.runtime.messages.gathered import of_all_ranks
from auto3d.runtime.waiting import waiting_for
from auto3d.trainer.gather import hash_of
from auto3d.trainer.instance import traits_of
from auto3d.trainer.looks import OF_MODEL, may_look
from auto3d.trainer.optimizer import fixed_of, numbers_of, parameters_of
from auto3d.trainer.pipeline import Pipeline
from auto3d.trainer.supported import own_events

_OURS = ("transformers.", "auto3d.")
_WITHOUT_VALUES = (GuardOnDataDependentSymNode, DataDependentOutputException, UnsupportedFakeTensorException)
_FLAGS = ("should_training_stop", "should_epoch_stop", "should_save", "should_evaluate", "should_log")
_AFTER = ("on_train_end",)  # nothing is trained any more
FIXED, TRAITS, VALUES, RATES = "fixed", "traits", "values", "rates"  # kinds of what a callback may change
_OF_ALL = {*OF_MODEL, "optimizer", "lr_scheduler", "args"}  # words of a callback that may change something


def name_of(callback: Any) -> str:
    return f"{type(callback).__module__}.{type(callback).__name__}"


def is_users(callback: Any) -> bool:
    return not name_of(callback).startswith(_OURS)


def events_with_weights(callbacks: Iterable[Any], words: Iterable[str] = OF_MODEL) -> set[str]:
    """The events of the user's ``callbacks`` that may look at a model: they hold it, or their code names ``words``."""
    return {
        event
        for callback in callbacks
        if is_users(callback) and may_look(callback, words)
        for event in own_events(type(callback))
    }


def _differing(before: Mapping[str, object], after: Mapping[str, object]) -> list[str]:
    """The names whose values differ, also those that only one of the two has."""
    return [
        name for name in {**before, **after} if name not in before or name not in after or before[name] != after[name]
    ]


class PipelineCallbacks(CallbackHandler):
    """``handler``, whose users' callbacks see and change what ``pipeline`` trains.

    Before the events ``with_weights`` the weights are gathered into the model; what a callback has changed by the end
    of an event of ``followed``, on all ranks alike, holds from then on. ``start_again`` builds the pipeline anew.
    Raises InputError for a change of what a pipeline does not follow, or of one rank alone.
    """

    optimizer: torch.optim.Optimizer | None
    lr_scheduler: Any

    def __init__(self, handler: CallbackHandler, pipeline: Pipeline, start_again: Callable[[], None]) -> None:
        self.__dict__ |= vars(handler)
        self._pipeline, self._start_again = pipeline, start_again
        self.with_weights: set[str] = set()  # the same on every rank
        self.followed: set[str] = set()  # likewise
        self.ranks_agree = False  # whether all ranks decide alike by themselves
        self.any_looks = False  # whether a method of the script may look at the model, on any rank

    def compare(self, methods: Iterable[Any], *, schedules: bool) -> None:
        """Find out whether all ranks have the same callbacks, none of the user's, which decide alike on all ranks if
        transformers ``schedules``; before which events they need the weights, and whether the script's ``methods`` do.
        """
        mine = (
            list(map(name_of, self.callbacks)),
            any(map(is_users, self.callbacks)),
            any(map(may_look, methods)),
            events_with_weights(self.callbacks),
            events_with_weights(self.callbacks, _OF_ALL),  # or may change what is trained, and how
        )
        of_ranks = [mine] * dist.get_world_size()
        with waiting_for("the names of the other ranks' callbacks"):
            dist.all_gather_object(of_ranks, mine)
        self.ranks_agree = schedules and all(names == mine[0] and not users for names, users, *_ in of_ranks)
        self.any_looks = any(looks for _, _, looks, *_ in of_ranks)
        self.with_weights = set().union(*(events for *_, events, _ in of_ranks))
        self.followed = set().union(*(events for *_, events in of_ranks))

    def agree(self, control: Any, optimizer: torch.optim.Optimizer) -> None:
        """Give ``control`` on all ranks the flags that the user's callbacks have set on any of them.

        Raises InputError unless all have the same numbers in the groups of ``optimizer``, and read the same values.
        """
        if self.ranks_agree:
            return
        numbers, place = (
            xxh3_64_intdigest(repr(watched).encode()) >> 2
            for watched in (numbers_of(optimizer), self._pipeline.value_changed)
        )
        alike = [numbers, -numbers, place, -place]  # the largest of each pair differ only by their signs
        flags = torch.tensor([*(int(getattr(control, name)) for name in _FLAGS), *alike])
        with waiting_for("the callbacks of the other ranks"):
            dist.all_reduce(flags, dist.ReduceOp.MAX)
        *of_flags, numbers, lowest_numbers, place, lowest_place = flags.tolist()
        if place != -lowest_place:
            raise InputError(
                f"Trainer: {self._pipeline.value_changed or 'something on another rank'} has changed, and the code of "
                "the model or its loss may read it, but not on all ranks; change it alike on all ranks"
            )
        if numbers != -lowest_numbers:
            raise InputError(
                "Trainer.optimizer: the ranks have other numbers in its groups, such as a learning rate; set them "
                "alike on all ranks, from nothing that differs between them"
            )
        for name, value in zip(_FLAGS, of_flags, strict=True):
            setattr(control, name, bool(value))

    def call_event(self, event: str, args: Any, state: Any, control: Any, **named: Any) -> Any:
        if event in self.with_weights:
            self._pipeline.gather()
        if event not in self.followed or event in _AFTER:
            return self._called(event, args, state, control, **named)
        looks = {kind: look for kind, look in self._looks.items() if kind != VALUES or event in self.with_weights}
        before = {kind: dict(look(args)) for kind, look in looks.items()}
        control = self._called(event, args, state, control, **named)
        after = {kind: dict(look(args)) for kind, look in looks.items()}
        changed = {kind: _differing(before[kind], after[kind]) for kind in looks}
        changed[FIXED] = [name for name in changed[FIXED] if name in before[FIXED]]  # nothing reads what is new
        self._follow(changed, event)
        return control

    def _called(self, event: str, args: Any, state: Any, control: Any, **named: Any) -> Any:
        try:
            return super().call_event(event, args, state, control, **named)
        except _WITHOUT_VALUES:
            raise InputError(
                f"callbacks: {self._users_of(event)}.{event}: it reads a tensor without values, which a hook or a "
                "forward has kept when the model was captured; the forward runs in the stages of the pipeline: return "
                "it there, as an output"
            ) from None

    def _users_of(self, event: str) -> str:
        """The names of the user's callbacks that have ``event``."""
        users = [callback for callback in self.callbacks if is_users(callback) and event in own_events(type(callback))]
        return " or ".join(dict.fromkeys(type(user).__name__ for user in users))

    def _follow(self, changed: Mapping[str, Sequence[str]], event: str) -> None:
        """Let the pipeline have what was ``changed``; ranks agree first, since each may have changed something else."""
        of_ranks = of_all_ranks([len(names) for names in changed.values()], torch.int64)
        on_any = dict(zip(changed, of_ranks.sum(dim=0).tolist(), strict=True))
        on_all = (of_ranks == of_ranks[0]).all()
        what = next(chain.from_iterable(changed.values()), "something on another rank")
        if on_any[FIXED] or not on_all:
            because = "which a pipeline cannot follow; change it before train()"
            if not on_any[FIXED]:
                because = "and another rank did not; change it alike on all ranks"
            raise InputError(
                f"callbacks: {self._users_of(event)}.{event}: it changed {what} during the training, {because}"
            )
        if on_any[TRAITS]:
            self._start_again()
        elif on_any.get(VALUES):
            self._pipeline.scatter()

    @property
    def _looks(self) -> dict[str, Callable[[Any], Iterator[tuple[str, Any]]]]:
        """Kind of what a callback may change -> (name, value) of each, given the arguments."""
        return {FIXED: self._fixed, TRAITS: self._traits, VALUES: self._values, RATES: self._rates}

    def _fixed(self, args: Any) -> Iterator[tuple[str, Any]]:
        for name, value in vars(args).items():
            yield f"args.{name}", value
        if self.optimizer is not None:
            yield from ((f"optimizer.param_groups[{place}]", "") for place in range(len(self.optimizer.param_groups)))
            yield from fixed_of(self.optimizer).items()

    def _traits(self, args: Any) -> Iterator[tuple[str, Any]]:
        yield from traits_of(self.model)
        yield from self._of_groups(parameters_of)

    def _values(self, args: Any) -> Iterator[tuple[str, Any]]:
        for name, tensor in (*self.model.named_parameters(), *self.model.named_buffers()):
            if not tensor.is_meta:
                yield f"the values of {name}", hash_of(tensor)

    def _rates(self, args: Any) -> Iterator[tuple[str, Any]]:
        yield from self._of_groups(numbers_of)
        yield "base_lrs of lr_scheduler", list(getattr(self.lr_scheduler, "base_lrs", ()))

    def _of_groups(self, look: Callable[[torch.optim.Optimizer], list[dict[str, Any]]]) -> Iterator[tuple[str, Any]]:
        for number, group in enumerate([] if self.optimizer is None else look(self.optimizer)):
            for name, value in group.items():
                yield f"{name} of optimizer.param_groups[{number}]", value
