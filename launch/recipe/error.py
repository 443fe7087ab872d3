"""The error that refuses a recipe."""

from pathlib import Path

from auto3d.errors import InputError, ProblemKind

COMMAND_LINE = "command line"  # source of overrides, named in messages in place of a file


class RecipeError(InputError):
    """A recipe cannot be used. The message is one line for its author: file, key, problem.

    ``file`` is where the key stands, and ``in_file`` the message for whoever knows that already: "plan.tp: is 3".
    """

    def __init__(self, file: Path | str, key: str, problem: str, *, kind: ProblemKind = "other") -> None:
        super().__init__(problem, key=f"{file}: {key}" if key else str(file), kind=kind)
        self.file, self.in_file = str(file), f"{key}: {problem}" if key else problem
