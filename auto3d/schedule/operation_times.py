"""The option ``times`` of schedules whose order depends on how long operations take."""

from dataclasses import dataclass
from math import isfinite

from auto3d.errors import InputError

EQUAL = "1-1-1-0"  # F = I = W, and messages take no time


@dataclass(frozen=True, kw_only=True)
class EqualTimes:
    """Times of one micro-batch on one stage, in any unit; all stages are equal."""

    forward: float
    backward_input: float
    backward_weight: float
    message: float


def parse_times(family: str, text: str) -> EqualTimes:
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
    return EqualTimes(forward=forward, backward_input=backward_input, backward_weight=backward_weight, message=message)
