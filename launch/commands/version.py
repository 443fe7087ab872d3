"""The version of auto3d, and the commit that it was made from."""

import subprocess
from importlib.metadata import version

from launch.recipe.shipped import SHIPPED


def version_and_commit() -> str:
    """Such as ``0.2.0 (commit 1a2b3c4)``; without the commit where there is neither a clone nor a record of one."""
    commit = _commit()
    return version("auto3d") + (f" (commit {commit})" if commit else "")


def _commit() -> str:
    recorded = SHIPPED / "commit"
    if recorded.is_file():
        return recorded.read_text().strip()
    if not (SHIPPED / ".git").exists():
        return ""
    command = ["git", "-C", str(SHIPPED), "describe", "--always", "--dirty"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=10).stdout.strip()
    except (OSError, subprocess.SubprocessError):  # without git, or in a clone of another user
        return ""
