"""The consoles that commands print to."""

from rich.console import Console


class _Console(Console):
    def on_broken_pipe(self) -> None:
        raise  # rich calls this while it handles BrokenPipeError, and would exit by itself


out = _Console(highlight=False)
err = _Console(stderr=True, highlight=False)


def note(text: str) -> None:
    """Print a line to standard error, as it is: square brackets are no markup, and long lines are not wrapped."""
    err.print(text, markup=False, soft_wrap=True)
