"""The option ``times`` of schedules whose order depends on how long operations take."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import isfinite
from statistics import fmean

from auto3d.errors import InputError

EQUAL = "1-1-1-0"  # F = I = W, and messages take no time
_DIGITS = 1000  # F, I and W are written in thousandths of their sum


@dataclass(frozen=True, kw_only=True)
class OperationTimes:
    """Times of one micro-batch on one stage, in any unit; all stages are equal."""

    forward: float
    backward_input: float
    backward_weight: float
    message: float


def parse_times(family: str, text: str) -> OperationTimes:
    """The times in a text such as ``10-11-9-1``: F, I, W and a message. Raises InputError if it has another form."""
    try:
        forward, backward_input, backward_weight, message = map(float, text.split("-"))
    except ValueError:
        valid = False
    else:
        finite = all(map(isfinite, (forward, backward_input, backward_weight, message)))
        valid = finite and min(forward, backward_input, backward_weight) > 0 and message >= 0
    if not valid:
        raise InputError(
            f"schedule {family}: times is {text!r}; write the times of F, I, W and a message in any unit, the first "
            "three above 0, as in 10-11-9-1"
        )
    return OperationTimes(
        forward=forward, backward_input=backward_input, backward_weight=backward_weight, message=message
    )


def write_times(
    *,
    forward: Sequence[float],
    backward_input: Sequence[float],
    backward_weight: Sequence[float],
    messages: Sequence[float],
) -> str:
    """The text that ``parse_times`` reads, from the times of each stage and of one message between each two stages.

    Stages are averaged. Times are rounded to thousandths of F + I + W, and F, I and W are at least one thousandth, so
    plans whose times hardly differ have the same order.
    """
    means = [fmean(forward), fmean(backward_input), fmean(backward_weight)]
    unit = sum(means) / _DIGITS
    if not unit:
        return EQUAL
    computing = (max(1, round(time / unit)) for time in means)
    return "-".join(map(str, (*computing, round(fmean(messages) / unit) if messages else 0)))
