"""Possible outcomes of an entry, and the meaning of the engine's errors for a user."""

import re
import traceback
from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path

from auto3d.errors import InputError
from tests.zoo.entry import Entry

PLANS = {"pp 2": 1, "dp 2 · pp 2": 2}  # name -> dp


class Result(StrEnum):
    RIGHT = "right"
    REFUSED = "refused"
    WRONG = "WRONG"
    CRASHED = "crashed"
    HUNG = "hung"
    UNCLEAR = "unclear"  # refused with torch's jargon, or in more than one line
    BROKEN = "broken"  # the entry does not run with plain PyTorch either


FAULTS = (Result.UNCLEAR, Result.HUNG, Result.CRASHED, Result.WRONG, Result.BROKEN)  # from bad to worst
JARGON = re.compile(  # words that only torch's developers know
    r"could not guard|unbacked|please (file|report)|file an issue|fake ?tensor|HigherOrderOperator|higher_order"
    r"|wrap_with_|aten::|prims[:.]|torch\.(ops|fx|export|_dynamo|compile)|dynamo|functional ?tensor|SymInt|pytree"
    r"|data-dependent (expression|operator)|\bproxy\b|__torch_\w+__|local_scalar_dense|/torch/\S+, line|guard_\w+"
    r"|meta tensors?\b|devices, (meta|cpu) and|lifted_tensor",
    re.IGNORECASE,
)


@dataclass(frozen=True)
class Outcome:
    """The outcome of an entry, or of one plan of it."""

    result: Result
    reason: str = ""  # one line
    detail: str = ""  # the traceback of a crash


class CrashedError(Exception):
    """An error of a rank other than a refusal."""


class HungError(Exception):
    """Ranks did not end within the time-out."""


def worst(found: list[Outcome], entry: Entry) -> Outcome:
    """The worst outcome of all plans, which stands for the entry."""
    order = [Result.RIGHT, Result.REFUSED, *FAULTS]
    chosen = max(found, key=lambda outcome: order.index(outcome.result))
    if chosen.result is Result.RIGHT and entry.only_refused:
        return Outcome(Result.WRONG, f"it must be refused: {entry.only_refused}")
    same = {outcome.reason.split(": ", 1)[-1] for outcome in found if outcome.result is chosen.result}
    if len(found) == len(PLANS) and len(same) == 1 and chosen.reason and found[0].result is found[1].result:
        return replace(chosen, reason=same.pop())  # the same under both plans
    return chosen


def failure(error: Exception) -> Outcome:
    """The outcome that an error of the engine means for a user."""
    detail = "".join(traceback.format_exception(error))
    if isinstance(error, InputError):
        text = str(error)
        jargon = JARGON.search(text)
        if "\n" in text:
            return Outcome(Result.UNCLEAR, f"{len(text.splitlines())} lines: {' '.join(text.split())}", detail)
        if jargon:
            return Outcome(Result.UNCLEAR, f"{text} [{jargon[0]}]", detail)
        return Outcome(Result.REFUSED, text)
    if isinstance(error, HungError):
        return Outcome(Result.HUNG, one_line(error))
    if isinstance(error, CrashedError):
        lines = [line for line in str(error).splitlines() if line and not line.startswith(" ")]
        frames = re.findall(r'File ".*?/((?:auto3d|torch|transformers)/[^"]+)", line (\d+)', str(error))
        where = f" ({frames[-1][0]}:{frames[-1][1]})" if frames else ""
        return Outcome(Result.CRASHED, f"{lines[-1] if lines else error}{where}", str(error))
    ours = [
        f"{Path(frame.filename).parent.name}/{Path(frame.filename).name}:{frame.lineno}"
        for frame in traceback.extract_tb(error.__traceback__)
        if "/auto3d/" in frame.filename
    ]
    return Outcome(Result.CRASHED, f"{type(error).__name__}: {one_line(error)} ({ours[-1] if ours else '?'})", detail)


def one_line(error: BaseException) -> str:
    """The first line of the error, or its class."""
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
