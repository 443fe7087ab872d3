"""The base class of all errors that a user can fix."""

from typing import Literal

ProblemKind = Literal["memory", "other"]  # "memory": a device lacks memory for the plan


class InputError(ValueError):
    """The user's input cannot be used. The message tells the user what is wrong, where, and what would be accepted.

    It is ``problem``, after the ``key`` of the input that is to blame, where that is known: "split: wte is too small".
    """

    def __init__(self, problem: str, *, key: str = "", kind: ProblemKind = "other") -> None:
        super().__init__(f"{key}: {problem}" if key else problem)
        self.problem, self.key = problem, key
        self.kind: ProblemKind = kind
