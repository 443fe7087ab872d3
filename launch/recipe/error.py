"""The error about a key of a recipe."""

from pathlib import Path

from auto3d.errors import InputError

COMMAND_LINE = "command line"  # in the place of a file: where overrides come from


class RecipeError(InputError):
    """A recipe that cannot be used; the message is one line for its author."""

    def __init__(self, file: Path | str, key: str, problem: str) -> None:
        super().__init__(f"{file}: {key}: {problem}" if key else f"{file}: {problem}")
