import fcntl
import os
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

import pytest

from tests.promises.running import ROOT
from tests.slurm.conftest import present_cluster  # noqa: F401 (a fixture)

TORCHRUN = "#!{python}\nfrom torch.distributed.run import main\n\nmain()\n"


@pytest.fixture(scope="session")
def wheel(own_cache: None) -> Path:
    """The programs of an environment with this tree's wheel and all packages of this one, but without the clone.

    All workers share it.
    """
    folder = Path(os.environ["AUTO3D_CACHE"]).with_name("wheel")
    folder.mkdir(exist_ok=True)
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (folder / "complete").exists():
            install_wheel(folder / "source", folder / "made", folder / "environment")
            (folder / "complete").touch()
    return folder / "environment/bin"


def install_wheel(source: Path, made: Path, environment: Path) -> None:
    tracked = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for name in tracked.splitlines():  # an older build in the clone must not get in
        if (ROOT / name).is_file():
            (source / name).parent.mkdir(parents=True, exist_ok=True)
            (source / name).write_bytes((ROOT / name).read_bytes())
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet"]
    build = ["wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", str(made), str(source)]
    subprocess.run([*pip, *build], check=True)
    venv.create(environment, with_pip=False, symlinks=True)
    python = environment / "bin/python"
    (file,) = made.glob("*.whl")
    subprocess.run([*pip, "--python", str(python), "install", "--no-deps", "--no-index", str(file)], check=True)
    code = "import sysconfig; print(sysconfig.get_path('purelib'))"
    site = subprocess.run([python, "-c", code], capture_output=True, text=True, check=True).stdout.strip()
    Path(site, "packages.pth").write_text(sysconfig.get_path("purelib"))
    (environment / "bin/torchrun").write_text(TORCHRUN.format(python=python))
    (environment / "bin/torchrun").chmod(0o755)
