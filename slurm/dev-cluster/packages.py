"""The Debian packages that the cluster needs."""

import shutil
from collections.abc import Callable

from commands import run, succeeds
from errors import DevClusterError

# Not mariadb-server, which would start its own database; only the programs are needed.
PACKAGES = (
    "iproute2",
    "mariadb-client-core",
    "mariadb-server-core",
    "munge",
    "slurm-client",
    "slurm-wlm-basic-plugins",
    "slurmctld",
    "slurmd",
    "slurmdbd",
)
SERVICES = ("slurmd", "slurmctld", "slurmdbd", "munge")  # started by apt with the packages of these names
INSTALL_TIMEOUT_S = 600


def install_missing(say: Callable[[str], None]) -> None:
    """Install missing packages with apt-get, and stop the daemons that apt started: the cluster starts its own."""
    missing = [package for package in PACKAGES if not _installed(package)]
    if not missing:
        return
    if shutil.which("apt-get") is None:
        raise DevClusterError(f"missing packages: {', '.join(missing)}; there is no apt-get to install them with")
    say(f"installing with apt-get: {' '.join(missing)}")
    apt_get = ["apt-get", "-o", "DPkg::Lock::Timeout=120", "--quiet", "--yes"]
    run(*apt_get, "update", timeout_s=INSTALL_TIMEOUT_S)
    try:
        run(
            *apt_get, "--no-install-recommends", "install", *missing,
            timeout_s=INSTALL_TIMEOUT_S, environment={"DEBIAN_FRONTEND": "noninteractive"},
        )  # fmt: skip
    finally:
        for service in SERVICES:
            if service in missing:
                succeeds("service", service, "stop", timeout_s=60)
                succeeds("update-rc.d", service, "disable")  # they must not start at the next boot either


def _installed(package: str) -> bool:
    try:
        return run("dpkg-query", "--show", "--showformat=${db:Status-Status}", package) == "installed"
    except DevClusterError:  # dpkg does not know the package
        return False
