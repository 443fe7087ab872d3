"""Model code that asks torch or transformers whether it is traced: the most common reason why captures differ."""

import re
import sys
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from types import CodeType, FrameType
from typing import Any
from unittest.mock import patch

import torch

from auto3d.capture.errors import frame_line, is_model_code

_QUESTION = re.compile(r"is_\w*(tracing|compiling|exporting)$")
_TORCH = (torch.compiler, torch.jit)
_COMPILER = ("is_compiling", "is_dynamo_compiling", "is_exporting")
# Functions of libraries whose eager branch no trace can follow: torch traces grouped products of bfloat16 only.
_TOLD_AT_ONCE = {("transformers.integrations.moe", "_can_use_grouped_mm")}


@dataclass(frozen=True)
class Question:
    """A line of the model's code that asks whether it is traced."""

    line: str  # `` at FILE, line N``
    name: str  # name of the function that it calls to ask
    names: dict[str, Any]  # globals of its module

    @contextmanager
    def answered_no(self) -> Iterator[None]:
        """Answer False, as in an eager run, on this line only."""
        owners = [owner for owner in _TORCH if hasattr(owner, self.name)]
        if self.name in self.names:
            with patch.dict(self.names, {self.name: self._answer(self.names[self.name])}):
                yield
        elif owners:
            with patch.object(owners[0], self.name, self._answer(getattr(owners[0], self.name))):
                yield
        else:
            yield

    def _answer(self, original: Callable) -> Callable:
        def answer(*args: Any, **kwargs: Any) -> Any:
            return False if frame_line(sys._getframe(1)) == self.line else original(*args, **kwargs)

        return answer


@contextmanager
def answered_as_eager(but: Collection[CodeType] = ()) -> Iterator[dict[CodeType, set[CodeType]]]:
    """Answer the model's code that it is not traced, so that it takes the same branches as in eager mode.

    The functions of ``but`` and of ``_TOLD_AT_ONCE`` get the true answer. Yields a mapping that gets each other
    function that asks, with its callers.
    """
    askers: dict[CodeType, set[CodeType]] = {}

    def for_model_code(original: Callable) -> Callable:
        def answer(*args: Any, **kwargs: Any) -> Any:
            frame: FrameType | None = sys._getframe(1)
            while frame is not None and _QUESTION.match(frame.f_code.co_name):
                frame = frame.f_back
            if frame is None or not is_model_code(frame.f_code.co_filename):
                return original(*args, **kwargs)
            if (frame.f_globals.get("__name__"), frame.f_code.co_name) in _TOLD_AT_ONCE:
                return original(*args, **kwargs)
            callers = askers.setdefault(frame.f_code, set())
            if frame.f_back is not None:
                callers.add(frame.f_back.f_code)
            return original(*args, **kwargs) if frame.f_code in but else False

        return answer

    owners = [*((torch.compiler, name) for name in _COMPILER), (torch.jit, "is_tracing")]
    if (transformers := sys.modules.get("transformers.utils.import_utils")) is not None:
        owners.append((transformers, "is_fake_tensor"))
    with ExitStack() as stack:
        for owner, name in owners:
            if hasattr(owner, name):
                stack.enter_context(patch.object(owner, name, for_model_code(getattr(owner, name))))
        yield askers


def misled(
    failed_in: CodeType | None, askers: Mapping[CodeType, set[CodeType]], but: Collection[CodeType]
) -> set[CodeType]:
    """The functions that may have led ``failed_in`` into an eager branch that cannot be traced.

    That is the function itself if it asked, and otherwise those that it called and that asked, as
    ``_can_use_grouped_mm`` of transformers does for its caller. Functions in ``but`` know the truth already.
    """
    if failed_in is not None and failed_in in askers and failed_in not in but:
        return {failed_in}
    return {asker for asker, callers in askers.items() if failed_in in callers and asker not in but}


def questions(run: Callable[[], Any]) -> list[Question]:
    """The lines of the model's code that ask whether they are traced during ``run()``, in order."""
    asked: dict[str, Question] = {}

    def follow(frame: FrameType, event: str, _: Any) -> None:
        name = frame.f_code.co_name
        if event != "call" or not _QUESTION.match(name):
            return
        asking = frame.f_back
        while asking is not None and _QUESTION.match(asking.f_code.co_name):
            name, asking = asking.f_code.co_name, asking.f_back
        if asking is not None and is_model_code(asking.f_code.co_filename):
            line = frame_line(asking)
            asked.setdefault(line, Question(line, name, asking.f_globals))

    before = sys.gettrace()
    sys.settrace(follow)
    try:
        run()
    finally:
        sys.settrace(before)
    return list(asked.values())
