"""A real SLURM cluster on one machine: `up`, `down` and `status`.

It runs Debian's munge, slurmctld, slurmdbd (with MariaDB) and one slurmd per node. Each host has its own network
namespace and its own link. All commands need root. `up` repairs a cluster of which a part is missing; `down` removes
everything except the packages.
"""

import argparse
import json
import re
import shutil
import socket
import sys
from dataclasses import dataclass
from pathlib import Path

import daemons
import network
from commands import require_root
from configuration import Paths, write, write_configuration
from description import CONTROL, Description, read_description
from errors import DescriptionError, DevClusterError
from packages import install_missing

HERE = Path(__file__).resolve().parent
# Not below /run, which systemd mounts noexec, because batch scripts are executed in this folder.
DEFAULT_FOLDER = Path("/var/lib/auto3d-cluster")
FOLDER = re.compile(r"/[A-Za-z0-9._/-]{1,60}")  # slurm.conf has no quotes; a socket's path has at most 108 bytes


def main() -> int:
    arguments = _parse()
    try:
        require_root()
        folder = _folder(arguments.folder)
        if arguments.verb == "status":
            return status(folder)
        with _one_at_a_time():
            if arguments.verb == "up":
                up(folder, arguments.description, arguments.nodes)
            else:
                down(folder)
    except DevClusterError as error:
        print(f"cluster: {error}", file=sys.stderr)
        return 2 if isinstance(error, DescriptionError) else 1
    return 0


def up(folder: Path, description_name: str | None, num_nodes: int | None) -> None:
    """Start the cluster, or those parts of it that are not running; without arguments, the cluster that is up."""
    paths = Paths(folder)
    present = _read_state(paths)
    if present and description_name is None and num_nodes is None:
        description = present.description
    else:
        description = read_description(description_name or "mixed", folder=HERE, num_nodes=num_nodes)
    if present and description != present.description:
        raise DescriptionError(f"another cluster is up in {folder}; run `make cluster-down` first")
    install_missing(say)
    subnet = present.subnet if present else _claim_folder(paths, description)
    for problem in network.make_network(description, subnet, folder):
        say(f"warning: {problem}")
    write_configuration(paths, description, subnet)
    daemons.start_munge(paths)
    daemons.start_database(paths)
    daemons.start_accounting(paths)
    daemons.start_controller(paths)
    daemons.start_nodes(paths, [node.name for node in description.nodes])
    number = len(description.nodes)
    say(f"{'1 node is' if number == 1 else f'{number} nodes are'} ready. To use the cluster from this shell:")
    print(f". {paths.env}", flush=True)


def down(folder: Path) -> None:
    """Kill every process, and remove every namespace, link, file and line in /etc/hosts, even of a partial cluster."""
    paths = Paths(folder)
    if folder.exists() and not paths.state.exists() and any(folder.iterdir()):
        raise DevClusterError(f"{folder} is not a cluster's folder: it has no {paths.state.name}; nothing was removed")
    daemons.end_clients(paths)
    daemons.kill_everything()
    network.remove_network()
    _remove_folder(paths)
    say("the cluster is down; its packages stay installed")


def status(folder: Path) -> int:
    """Print which parts of the cluster run; returns 0 if all of them do."""
    paths = Paths(folder)
    present = _read_state(paths)
    if present is None:
        say("there is no cluster; `make cluster-up` starts one")
        return 1
    print(f"folder    {folder}\nnetwork   {present.subnet}")
    complete = True
    for program in ("munged", "mariadbd", "slurmdbd", "slurmctld"):
        runs = daemons.running(CONTROL, program)
        complete &= runs
        print(f"{program:<9} {'runs' if runs else 'DOES NOT RUN'}")
    try:
        states = daemons.node_states(paths)
    except DevClusterError as error:
        print(f"nodes     {error}")
        return 1
    for node in present.description.nodes:
        state = states.get(node.name, "unknown") if daemons.running(node.name, "slurmd") else "its slurmd DOES NOT RUN"
        complete &= daemons.usable(state)
        print(f"{node.name:<9} {state}; {network.link(node)}")
    print(f"use it    . {paths.env}")
    return 0 if complete else 1


@dataclass(frozen=True)
class _State:
    """The choices that were made when the cluster was first started."""

    description: Description
    subnet: str


def _read_state(paths: Paths) -> _State | None:
    if not paths.state.exists():
        return None
    content = json.loads(paths.state.read_text())
    return _State(Description.from_dict(content["description"]), content["subnet"])


def _claim_folder(paths: Paths, description: Description) -> str:
    """Take the folder for a new cluster; returns the cluster's subnet."""
    if paths.folder.exists() and any(paths.folder.iterdir()):
        raise DescriptionError(f"{paths.folder} is not empty and no cluster's folder; name a new one: FOLDER=/path")
    daemons.kill_everything()  # left behind by an interrupted `down`
    network.remove_network()
    network.check_names(description)
    paths.folder.mkdir(parents=True, exist_ok=True)
    paths.folder.chmod(0o755)
    subnet = network.choose_subnet()
    write(paths.state, json.dumps({"subnet": subnet, "description": description.to_dict()}, indent=2) + "\n")
    return subnet


def _remove_folder(paths: Paths) -> None:
    """Remove the folder. Its state file, which marks it as ours, goes last, so that `down` can be repeated."""
    if not paths.folder.exists():
        return
    for path in paths.folder.iterdir():
        if path.is_dir():
            shutil.rmtree(path)
        elif path != paths.state:
            path.unlink()
    paths.state.unlink(missing_ok=True)
    paths.folder.rmdir()


def _folder(requested: Path | None) -> Path:
    """The requested folder, or by default that of the cluster that is up."""
    present = network.owner()
    folder = requested or Path(present or DEFAULT_FOLDER)
    if present and folder != Path(present):
        raise DescriptionError(f"a cluster is up in {present}, and a machine can have only one; use FOLDER={present}")
    if not FOLDER.fullmatch(str(folder)):
        raise DescriptionError(f"FOLDER={folder}: give an absolute path of at most 60 letters, digits and ./_-")
    return folder


def _one_at_a_time() -> socket.socket:
    """A lock that ends with this process: an abstract socket, whose name only one process can hold."""
    lock = socket.socket(socket.AF_UNIX)
    try:
        lock.bind("\0auto3d-development-cluster")
    except OSError:
        raise DevClusterError("another cluster-up or cluster-down is running; wait until it ends") from None
    return lock


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("verb", choices=("up", "down", "status"))
    parser.add_argument("--nodes", type=int, help="start only this many nodes, the first of the description")
    parser.add_argument("--description", help="name of a YAML file in this folder, or the path of one (default mixed)")
    parser.add_argument("--folder", type=Path, help=f"folder for the cluster's files (default {DEFAULT_FOLDER})")
    return parser.parse_args()


def say(text: str) -> None:
    print(f"cluster: {text}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
