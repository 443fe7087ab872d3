"""The README's two commands in a clean clone, in a folder with a space in its name: python -m tests.release.clone"""

import os
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

from tests.release.parts import ROOT


def main() -> None:
    with TemporaryDirectory(prefix="a clone ") as folder:
        subprocess.run(["git", "clone", "--quiet", str(ROOT), folder], check=True)
        environment = os.environ | {"AUTO3D_CACHE": str(Path(folder, "cache"))}
        for command in ("make sweep RECIPE=tiny", "make test"):
            print(f"$ {command}", flush=True)
            code = subprocess.run(command.split(), cwd=folder, env=environment).returncode
            if code:
                sys.exit(f"{command}: exit code {code}")


if __name__ == "__main__":
    main()
