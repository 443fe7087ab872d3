"""The cluster that a YAML file describes: its nodes, and the link of each to the switch."""

import math
import re
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from errors import DescriptionError

CONTROL = "control"  # host name of the controller, which is not a node
MAX_NODES = 64
NODE_NAME = re.compile(r"[a-z][a-z0-9]{0,7}")  # with a prefix also an interface's name, of at most 15 characters
NODE_KEYS = ("bandwidth_mbit_s", "latency_ms")


@dataclass(frozen=True, kw_only=True)
class DevNode:
    """A node and its link to the switch, the same in both directions."""

    name: str
    bandwidth_mbit_s: float
    latency_ms: float  # latency between the node and the switch


@dataclass(frozen=True, kw_only=True)
class Description:
    nodes: tuple[DevNode, ...]
    cpus_per_node: int

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @staticmethod
    def from_dict(content: dict[str, Any]) -> "Description":
        """The description from which ``to_dict`` made ``content``."""
        nodes = tuple(DevNode(**node) for node in content["nodes"])
        return Description(nodes=nodes, cpus_per_node=content["cpus_per_node"])


def read_description(name: str, *, folder: Path, num_nodes: int | None) -> Description:
    """The first ``num_nodes`` nodes (all if None) of ``folder/NAME.yaml``, or of the file that ``name`` is a path to.

    Raises DescriptionError with the file, the key, what was found and what would be accepted.
    """
    import yaml  # imported here because `down` must work with Python's standard library

    path = Path(name) if name.endswith(".yaml") else folder / f"{name}.yaml"
    try:
        content = yaml.safe_load(path.read_text())
    except FileNotFoundError:
        known = ", ".join(sorted(file.stem for file in folder.glob("*.yaml")))
        raise DescriptionError(f"{path}: no such file; name one of {known}, or give the path to a .yaml file") from None
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise DescriptionError(f"{path}: {' '.join(str(error).split())}") from None
    _check_keys(path, "the file", content, ("cpus_per_node", "nodes"))
    nodes = content["nodes"]
    if not isinstance(nodes, dict) or not 1 <= len(nodes) <= MAX_NODES:
        raise DescriptionError(f"{path}: nodes: found {nodes!r}; give 1 to {MAX_NODES} nodes, each NAME: {{…}}")
    described = tuple(_node(path, name, link) for name, link in nodes.items())
    cpus = content["cpus_per_node"]
    if not isinstance(cpus, int) or not 1 <= cpus <= 1024:
        raise DescriptionError(f"{path}: cpus_per_node: found {cpus!r}; give a whole number from 1 to 1024")
    wanted = len(described) if num_nodes is None else num_nodes
    if not 1 <= wanted <= len(described):
        raise DescriptionError(f"NODES={wanted}: {path} describes {len(described)} nodes; give 1 to {len(described)}")
    return Description(nodes=described[:wanted], cpus_per_node=cpus)


def _node(path: Path, name: Any, link: Any) -> DevNode:
    if not isinstance(name, str) or not NODE_NAME.fullmatch(name) or name == CONTROL:
        problem = f"1 to 8 small letters and digits, a letter first, and not {CONTROL!r}"
        raise DescriptionError(f"{path}: nodes: found the name {name!r}; give {problem}")
    _check_keys(path, f"nodes.{name}", link, NODE_KEYS)
    bandwidth, latency = (
        _number(path, f"nodes.{name}.{key}", link[key], least=least, most=most)
        for key, least, most in (("bandwidth_mbit_s", 1, 100_000), ("latency_ms", 0, 1000))
    )
    return DevNode(name=name, bandwidth_mbit_s=bandwidth, latency_ms=latency)


def _check_keys(path: Path, where: str, found: Any, keys: tuple[str, ...]) -> None:
    if not isinstance(found, dict) or set(found) != set(keys):
        keys_found = ", ".join(map(str, found)) if isinstance(found, dict) else repr(found)
        raise DescriptionError(f"{path}: {where}: found {keys_found}; give exactly {', '.join(keys)}")


def _number(path: Path, where: str, found: Any, *, least: float, most: float) -> float:
    is_number = isinstance(found, (int, float)) and not isinstance(found, bool) and math.isfinite(found)
    if not is_number or not least <= found <= most:
        raise DescriptionError(f"{path}: {where}: found {found!r}; give a number from {least} to {most}")
    return float(found)
