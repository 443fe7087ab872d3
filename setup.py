"""Puts recipes and scripts for sbatch into the wheel, where launch/recipe/shipped.py finds them.

Everything else about the package stands in pyproject.toml.
"""

import shutil
import subprocess
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py

FILES = ("recipes/**/*.yaml", "recipes/**/*.py", "recipes/**/data/*", "slurm/*.sbatch", "slurm/*.sh")


class BuildWithShippedFiles(build_py):
    def run(self) -> None:
        super().run()
        if self.editable_mode:  # the clone has them
            return
        shipped = Path(self.build_lib) / "launch" / "shipped"
        shutil.rmtree(shipped, ignore_errors=True)  # an earlier build may have left files
        for file in (file for pattern in FILES for file in Path().glob(pattern) if file.is_file()):
            (shipped / file).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(file, shipped / file)
        (shipped / "commit").write_text(_commit())


def _commit() -> str:
    """The commit of the clone that is built, or nothing if it is none."""
    command = ["git", "describe", "--always", "--dirty"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return ""


setup(cmdclass={"build_py": BuildWithShippedFiles})
