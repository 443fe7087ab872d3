"""The error of a model that cannot be captured: its cause in a user's words, and the line of the model's own code."""

import re
import sys
import sysconfig
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from types import CodeType, FrameType, TracebackType

import torch
from torch import fx
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode
from torch.fx.proxy import TracerBase

from auto3d.errors import InputError

_ENGINE, _TORCH = Path(__file__).parents[1], Path(torch.__file__).parent
_STANDARD_LIBRARY = Path(sysconfig.get_paths()["stdlib"])
_FRAME = re.compile(r'File "(?P<file>.+?)", line (?P<line>\d+)')
_DATA_DEPENDENT = (
    "its code decides by the values of tensors, or takes a size from them, which a captured program cannot",
    "make it a setting, or compute all cases and choose with torch.where",
)
_UNTRACEABLE = (
    "its code cannot be traced as operations on tensors",
    "write it with plain tensor operations, or keep it out of forward",
)
KEPT_ELSEWHERE = (
    "it uses a tensor that is kept where no attribute, list or dict of a module has it",
    "keep it as an attribute of a module",
)
_JARGON = re.compile(
    r"\bguard|symint|symbol|unbacked|faketensor|fake tensor|functional ?tensor|proxy|higherorder|functorch|dynamo|"
    r"file an? (issue|bug)|torch\._|\bu\d+\b|dispatch|make_fx|aten[.:]|export|meta tensor|inductor|data-dependent",
    re.IGNORECASE,
)


class CaptureError(InputError):
    """A model that cannot be captured; the message names the line of the model's code where there is one."""


def explain(error: BaseException) -> str:
    """Why the model's code failed, where, and what helps, in one line without torch's words about its own tracing."""
    reason, remedy = _cause(error)
    return f"{reason}{error_line(error)}{'; ' if remedy else ''}{remedy}"


def _cause(error: BaseException) -> tuple[str, str]:
    """The reason, and what helps where it is known."""
    errors = list(_chain(error))
    for each in errors:
        text = _first_line(each)
        if isinstance(each, GuardOnDataDependentSymNode) or "data-dependent" in text.lower():
            return _DATA_DEPENDENT
        if "same device" in text and "meta" in text:
            return KEPT_ELSEWHERE
    original = errors[-1]  # the model's own error, before torch wrapped it
    text = _first_line(original)
    if _JARGON.search(text):
        return _UNTRACEABLE
    return text if isinstance(original, RuntimeError | ValueError) else f"{type(original).__name__}: {text}", ""


def node_line(node: fx.Node) -> str:
    """`` at FILE, line N`` of the model's code that made this node, or nothing."""
    frames = _FRAME.findall(node.meta.get("stack_trace") or "")
    return next((_at(file, line) for file, line in reversed(frames) if is_model_code(file)), "")


@contextmanager
def every_line_recorded() -> Iterator[None]:
    """Let torch.export note for each node all frames of the code that made it, and not those of ``forward`` alone."""
    filtered = TracerBase._filter_traceback_frames
    TracerBase._filter_traceback_frames = lambda self, frames: frames
    try:
        yield
    finally:
        TracerBase._filter_traceback_frames = filtered


def error_line(error: BaseException) -> str:
    """`` at FILE, line N``: the deepest line of the model's code in the tracebacks of the error and its causes."""
    trace = _deepest(error)
    return _at(trace.tb_frame.f_code.co_filename, trace.tb_lineno) if trace is not None else ""


def failing_function(error: BaseException) -> CodeType | None:
    """The code of the deepest function of the model's code in the tracebacks of the error and its causes."""
    trace = _deepest(error)
    return trace.tb_frame.f_code if trace is not None else None


def _deepest(error: BaseException) -> TracebackType | None:
    found = None
    for each in _chain(error):
        trace = each.__traceback__
        while trace is not None:
            if is_model_code(trace.tb_frame.f_code.co_filename):
                found = trace
            trace = trace.tb_next
    return found


def _chain(error: BaseException) -> Iterator[BaseException]:
    """The error, what it was raised from, and so on."""
    seen: set[int] = set()
    current: BaseException | None = error
    while current is not None and id(current) not in seen:
        seen.add(id(current))
        yield current
        current = current.__cause__ or (None if current.__suppress_context__ else current.__context__)


def _first_line(error: BaseException) -> str:
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)


def calling_line() -> str:
    """`` at FILE, line N``: the innermost line of the model's code that is being executed, or nothing."""
    frame = sys._getframe(1)
    while frame is not None:
        if is_model_code(frame.f_code.co_filename):
            return frame_line(frame)
        frame = frame.f_back
    return ""


def frame_line(frame: FrameType) -> str:
    """`` at FILE, line N``: the line that ``frame`` is at."""
    return _at(frame.f_code.co_filename, frame.f_lineno)


def _at(file: str, line: int | str) -> str:
    return f" at {file}, line {line}"


@cache
def is_model_code(name: str) -> bool:
    """Whether the source file is neither Python's, nor torch's, nor the engine's: a user's, or another package's."""
    file = Path(name)
    of_python = file.is_relative_to(_STANDARD_LIBRARY) and "site-packages" not in file.parts
    return file.is_file() and not (of_python or file.is_relative_to(_ENGINE) or file.is_relative_to(_TORCH))
