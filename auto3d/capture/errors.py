"""The error for a model that cannot be captured: the cause in a user's words, and the line of the model's code."""

import re
import sys
import sysconfig
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from types import CodeType, FrameType, TracebackType
from unittest.mock import patch

import torch
from torch import fx
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode
from torch.fx.proxy import TracerBase

from auto3d.errors import InputError

_ENGINE, _TORCH = Path(__file__).parents[1], Path(torch.__file__).parent
_STANDARD_LIBRARY = Path(sysconfig.get_paths()["stdlib"])
_FRAME = re.compile(r'File "(?P<file>.+?)", line (?P<line>\d+)')
_DATA_DEPENDENT = (
    "its code branches on the values of tensors, or takes a size from them, which a captured program cannot do",
    "make the choice a setting, or compute all cases and select with torch.where",
)
_UNTRACEABLE = (
    "its code cannot be traced as operations on tensors",
    "write it with plain tensor operations, or move it out of forward",
)
KEPT_ELSEWHERE = (
    "it uses a tensor that no module holds as an attribute or in a list or dict",
    "make the tensor an attribute or a buffer of a module",
)
_JARGON = re.compile(
    r"\bguard|symint|symbol|unbacked|faketensor|fake tensor|functional ?tensor|proxy|higherorder|functorch|dynamo|"
    r"file an? (issue|bug)|torch\._|\bu\d+\b|dispatch|make_fx|aten[.:]|export|meta tensor|inductor|data-dependent",
    re.IGNORECASE,
)


class CaptureError(InputError):
    """A model that cannot be captured; the message names the line of the model's code if it is known."""


def explain(error: BaseException) -> str:
    """One line: why and where the model's code failed, and a remedy if one is known, without torch's tracing jargon."""
    reason, remedy = _cause(error)
    return f"{reason}{error_line(error)}{'; ' if remedy else ''}{remedy}"


def _cause(error: BaseException) -> tuple[str, str]:
    """(reason, remedy); the remedy is empty where none is known."""
    errors = list(_chain(error))
    for raised in errors:
        text = _first_line(raised)
        if isinstance(raised, GuardOnDataDependentSymNode) or "data-dependent" in text.lower():
            return _DATA_DEPENDENT
        if "same device" in text and "meta" in text:
            return KEPT_ELSEWHERE
    original = errors[-1]  # the error of the model's code, before torch wrapped it
    text = _first_line(original)
    if _JARGON.search(text):
        return _UNTRACEABLE
    return text if isinstance(original, RuntimeError | ValueError) else f"{type(original).__name__}: {text}", ""


def node_line(node: fx.Node) -> str:
    """`` at FILE, line N``: the line of the model's code that made this node; empty if it is not known."""
    frames = _FRAME.findall(node.meta.get("stack_trace") or "")
    return next((_at(file, line) for file, line in reversed(frames) if is_model_code(file)), "")


@contextmanager
def every_line_recorded() -> Iterator[None]:
    """Let torch.export record all frames of the code that made a node. By default it records frames of ``forward``."""
    with patch.object(TracerBase, "_filter_traceback_frames", lambda self, frames: frames):
        yield


def error_line(error: BaseException) -> str:
    """`` at FILE, line N``: the deepest line of the model's code in the tracebacks of the error and its causes."""
    trace = _deepest(error)
    return _at(trace.tb_frame.f_code.co_filename, trace.tb_lineno) if trace is not None else ""


def failing_function(error: BaseException) -> CodeType | None:
    """The deepest function of the model's code in the tracebacks of the error and its causes; None if there is none."""
    trace = _deepest(error)
    return trace.tb_frame.f_code if trace is not None else None


def _deepest(error: BaseException) -> TracebackType | None:
    deepest = None
    for raised in _chain(error):
        trace = raised.__traceback__
        while trace is not None:
            if is_model_code(trace.tb_frame.f_code.co_filename):
                deepest = trace
            trace = trace.tb_next
    return deepest


def _chain(error: BaseException) -> Iterator[BaseException]:
    """The error, the error that it was raised from, and so on."""
    seen: set[int] = set()
    current: BaseException | None = error
    while current is not None and id(current) not in seen:
        seen.add(id(current))
        yield current
        current = current.__cause__ or (None if current.__suppress_context__ else current.__context__)


def _first_line(error: BaseException) -> str:
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)


def calling_line() -> str:
    """`` at FILE, line N``: the innermost line of the model's code on the current stack; empty if there is none."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if is_model_code(frame.f_code.co_filename):
            return frame_line(frame)
        frame = frame.f_back
    return ""


def frame_line(frame: FrameType) -> str:
    """`` at FILE, line N``: the current line of ``frame``."""
    return _at(frame.f_code.co_filename, frame.f_lineno)


def _at(file: str, line: int | str) -> str:
    return f" at {file}, line {line}"


@cache
def is_model_code(name: str) -> bool:
    """Whether the source file ``name`` belongs to a user or a package, and not to Python, torch or the engine."""
    file = Path(name)
    of_python = file.is_relative_to(_STANDARD_LIBRARY) and "site-packages" not in file.parts
    return file.is_file() and not (of_python or file.is_relative_to(_ENGINE) or file.is_relative_to(_TORCH))
