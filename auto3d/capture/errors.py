"""The error of a model that cannot be captured, and the line of the model's own code to name in it."""

import re
import sys
import sysconfig
from functools import cache
from pathlib import Path
from types import FrameType

import torch
from torch import fx

from auto3d.errors import InputError

_ENGINE, _TORCH = Path(__file__).parents[1], Path(torch.__file__).parent
_STANDARD_LIBRARY = Path(sysconfig.get_paths()["stdlib"])
_FRAME = re.compile(r'File "(?P<file>.+?)", line (?P<line>\d+)')


class CaptureError(InputError):
    """A model that cannot be captured; the message names the line of the model's code where there is one."""


def node_line(node: fx.Node) -> str:
    """`` at FILE, line N`` of the model's code that made this node, or nothing."""
    frames = _FRAME.findall(node.meta.get("stack_trace") or "")
    return next((_at(file, line) for file, line in reversed(frames) if is_model_code(file)), "")


def error_line(error: Exception) -> str:
    """`` at FILE, line N``: the deepest line of the model's code in the traceback, or nothing."""
    found = ""
    trace = error.__traceback__
    while trace is not None:
        file = trace.tb_frame.f_code.co_filename
        if is_model_code(file):
            found = _at(file, trace.tb_lineno)
        trace = trace.tb_next
    return found


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
