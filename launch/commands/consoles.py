"""The consoles that commands print to."""

from rich.console import Console


class _Console(Console):
    def on_broken_pipe(self) -> None:
        raise  # rich calls this while it handles BrokenPipeError, and would exit by itself


PLAIN = {"markup": False, "soft_wrap": True}  # arguments of print() for text that is not rich's markup
out = _Console(highlight=False)
err = _Console(stderr=True, highlight=False)
