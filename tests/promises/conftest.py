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
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The programs of an environment with this tree's wheel and all packages of this one, but without the clone."""
    source, made = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("wheel")
    tracked = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for name in tracked.splitlines():  # an older build in the clone must not get in
        if (ROOT / name).is_file():
            (source / name).parent.mkdir(parents=True, exist_ok=True)
            (source / name).write_bytes((ROOT / name).read_bytes())
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet"]
    build = ["wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", str(made), str(source)]
    subprocess.run([*pip, *build], check=True)
    environment = tmp_path_factory.mktemp("environment")
    venv.create(environment, with_pip=False, symlinks=True)
    python = environment / "bin/python"
    (file,) = made.glob("*.whl")
    subprocess.run([*pip, "--python", str(python), "install", "--no-deps", "--no-index", str(file)], check=True)
    code = "import sysconfig; print(sysconfig.get_path('purelib'))"
    site = subprocess.run([python, "-c", code], capture_output=True, text=True, check=True).stdout.strip()
    Path(site, "packages.pth").write_text(sysconfig.get_path("purelib"))
    (environment / "bin/torchrun").write_text(TORCHRUN.format(python=python))
    (environment / "bin/torchrun").chmod(0o755)
    return environment / "bin"
