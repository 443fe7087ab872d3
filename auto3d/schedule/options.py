"""Checks of the options that several schedules have."""

from collections.abc import Sequence

from auto3d.errors import InputError

RECOMPUTE = ("none", "full")
SYNC = ("lazy", "eager", "eager-opt")


def check_choice(family: str, option: str, value: str, choices: Sequence[str]) -> None:
    """Raise InputError unless ``value`` is one of ``choices``."""
    if value not in choices:
        raise InputError(f"schedule {family}: {option} is {value!r}; it must be one of {', '.join(choices)}")


def check_least(family: str, option: str, value: int, least: int) -> None:
    """Raise InputError unless ``value`` is ``least`` or more."""
    if value < least:
        raise InputError(f"schedule {family}: {option} is {value}; it must be {least} or more")


def check_percentage(family: str, option: str, value: int) -> None:
    """Raise InputError unless ``value`` is from 1 to 100."""
    if not 1 <= value <= 100:
        raise InputError(f"schedule {family}: {option} is {value}; it is a percentage, from 1 to 100")


def recomputing(family: str, stages: int, recompute: str) -> frozenset[int]:
    """The stages that recompute their activations: all if ``recompute`` is ``full``, no stage if it is ``none``."""
    check_choice(family, "recompute", recompute, RECOMPUTE)
    return frozenset(range(stages)) if recompute == "full" else frozenset()
