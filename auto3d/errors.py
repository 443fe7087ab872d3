"""The base class of all errors that a user can fix."""

from typing import Literal

ProblemKind = Literal["memory", "other"]  # "memory": a device lacks memory for the plan


class InputError(ValueError):
    """The user's input cannot be used. The message tells the user what is wrong, where, and what would be accepted."""

    def __init__(self, message: str, *, kind: ProblemKind = "other") -> None:
        super().__init__(message)
        self.kind: ProblemKind = kind
