"""Exit codes of the command line; 0 is success."""

import sys

RUN_FAILED, BAD_INPUT, INTERRUPTED = 1, 2, 130


def complain(message: str, code: int) -> int:
    """Print ``message`` to standard error as the command's one line of error; returns ``code``."""
    print(f"auto3d: {message}", file=sys.stderr)
    return code
