"""The cluster's network: a namespace for each host, a switch that joins them, and a shaped link for each node.

Every function can be called again, and then repairs what is missing.
"""

import ipaddress
import json
import math
from contextlib import suppress
from pathlib import Path

from commands import run, succeeds
from description import CONTROL, Description, DevNode
from errors import DevClusterError

PREFIX = "auto3d-"  # prefix of namespaces, and of interfaces on the switch's side
SWITCH = "auto3d"  # name of the bridge
INTERFACE = "eth0"  # name of a node's only interface
NAMESPACES = Path("/run/netns")
HOSTS = Path("/etc/hosts")
HOSTS_MARK = "# auto3d development cluster"
QUEUE_MS = 50  # length of a link's queue; further packets are dropped, as by a real switch
MIN_BURST_BYTES = 64 * 1024  # largest packet that Linux passes between virtual interfaces
BURST_MS = 2


def choose_subnet() -> str:
    """A network of 256 addresses to which this machine has no route."""
    routes = json.loads(run("ip", "-4", "-json", "route", "show", "table", "all"))
    taken = [ipaddress.ip_network(route["dst"]) for route in routes if route["dst"] != "default"]
    for second in range(86, 256):
        subnet = ipaddress.ip_network(f"10.{second}.0.0/24")
        if not any(subnet.overlaps(other) for other in taken):
            return str(subnet)
    raise DevClusterError("found no free network from 10.86.0.0/24 to 10.255.0.0/24: `ip route` lists all of them")


def address(subnet: str, index: int) -> str:
    """Address number ``index`` of ``subnet``: nodes count from 1; this machine is -2 and the controller -3."""
    return str(ipaddress.ip_network(subnet)[index])


def host_addresses(description: Description, subnet: str) -> dict[str, str]:
    """The address of each node and of the controller, by host name."""
    nodes = {node.name: address(subnet, number) for number, node in enumerate(description.nodes, start=1)}
    return {CONTROL: control_address(subnet), **nodes}


def control_address(subnet: str) -> str:
    return address(subnet, -3)


def namespace(host: str) -> str:
    return PREFIX + host


def namespaces() -> list[str]:
    """The namespaces of a cluster, complete or not."""
    return sorted(path.name for path in NAMESPACES.glob(f"{PREFIX}*"))


def owner() -> str | None:
    """The folder of the cluster whose switch is up on this machine; the switch carries it as its alias."""
    try:
        return Path(f"/sys/class/net/{SWITCH}/ifalias").read_text().strip()
    except OSError:
        return None


def make_network(description: Description, subnet: str, folder: Path) -> list[str]:
    """Make the missing parts of the network; returns messages on what this machine's kernel cannot do."""
    if owner() is None:
        run("ip", "link", "add", SWITCH, "type", "bridge")
    run("ip", "link", "set", SWITCH, "alias", str(folder))
    _set_address(["ip"], SWITCH, address(subnet, -2))
    addresses = host_addresses(description, subnet)
    for host, host_address in addresses.items():
        _make_host(host, host_address)
    has_latency = [_shape(node) for node in description.nodes]
    _write_hosts([f"{host_address} {host} {HOSTS_MARK}" for host, host_address in addresses.items()])
    return [] if all(has_latency) else ["this kernel has no netem, so links have their bandwidth, but no added latency"]


def link(node: DevNode) -> str:
    """A text that describes the node's link."""
    has_latency = "netem" in run("tc", "-netns", namespace(node.name), "qdisc", "show", "dev", INTERFACE)
    latency = f"{node.latency_ms:g} ms to the switch" if has_latency else "no added latency"
    return f"{node.bandwidth_mbit_s:g} Mbit/s, {latency}"


def remove_network() -> None:
    """Undo ``make_network``; no process may remain in the namespaces."""
    for name in namespaces():
        if not succeeds("ip", "netns", "delete", name):
            (NAMESPACES / name).unlink(missing_ok=True)  # a file on which nothing was ever mounted
    links = [link["ifname"] for link in json.loads(run("ip", "-json", "link", "show"))]
    for name in links:
        if name.startswith(PREFIX) or name == SWITCH:
            succeeds("ip", "link", "delete", name)  # fails if the kernel has removed it with its namespace
    _write_hosts([])
    _remove_empty_folder_of_namespaces()


def check_names(description: Description) -> None:
    """Raise DevClusterError if this machine already has a host with the name of a node."""
    names = {CONTROL, *(node.name for node in description.nodes)}
    for line in HOSTS.read_text().splitlines():
        taken = names & set(line.partition("#")[0].split()[1:])
        if taken and not line.endswith(HOSTS_MARK):
            raise DevClusterError(f"{HOSTS} already has a host called {min(taken)}: {line.strip()!r}; rename the node")


def _make_host(host: str, host_address: str) -> None:
    name, outside = namespace(host), PREFIX + host
    if not succeeds("ip", "-netns", name, "link", "show", "lo"):
        (NAMESPACES / name).unlink(missing_ok=True)
        run("ip", "netns", "add", name)
    if not succeeds("ip", "-netns", name, "link", "show", INTERFACE):
        run("ip", "link", "add", outside, "type", "veth", "peer", "name", INTERFACE, "netns", name)
    run("ip", "link", "set", outside, "master", SWITCH, "up")
    run("ip", "-netns", name, "link", "set", "lo", "up")
    _set_address(["ip", "-netns", name], INTERFACE, host_address)


def _set_address(ip: list[str], device: str, host_address: str) -> None:
    """Set the address of ``device``, and a hardware address derived from it.

    So the other hosts' address caches stay right even if the device is made again.
    """
    hardware = "02:00:" + ":".join(f"{byte:02x}" for byte in ipaddress.ip_address(host_address).packed)
    run(*ip, "link", "set", device, "address", hardware, "up")
    run(*ip, "address", "replace", f"{host_address}/24", "dev", device)


def _shape(node: DevNode) -> bool:
    """Limit the bandwidth of both directions of the node's link; returns whether its latency could be added."""
    rate_bits_s = round(node.bandwidth_mbit_s * 1e6)
    burst_bytes = max(MIN_BURST_BYTES, math.ceil(rate_bits_s / 8 * BURST_MS / 1000))
    limits = ["rate", f"{rate_bits_s}bit", "burst", str(burst_bytes), "latency", f"{QUEUE_MS}ms"]
    delay = ["netem", "delay", f"{round(node.latency_ms * 1000)}us", "limit", "10000"]
    has_latency = True
    for qdisc in (
        ["tc", "-netns", namespace(node.name), "qdisc", "replace", "dev", INTERFACE],  # packets that the node sends
        ["tc", "qdisc", "replace", "dev", PREFIX + node.name],  # packets that the switch sends to the node
    ):
        has_netem = succeeds(*qdisc, "root", "handle", "1:", *delay)
        parent = ["parent", "1:1"] if has_netem else ["root"]
        run(*qdisc, *parent, "handle", "10:", "tbf", *limits)
        has_latency &= has_netem or node.latency_ms == 0
    return has_latency


def _write_hosts(ours: list[str]) -> None:
    """Put our lines at the end of /etc/hosts, in place, because a file that a container mounts cannot be replaced."""
    present = HOSTS.read_text()
    others = [line for line in present.splitlines() if not line.endswith(HOSTS_MARK)]
    wanted = "".join(f"{line}\n" for line in [*others, *ours])
    if wanted != present:
        HOSTS.write_text(wanted)


def _remove_empty_folder_of_namespaces() -> None:
    """Remove /run/netns, mounted on itself, which `ip netns add` leaves behind and makes again when needed."""
    if NAMESPACES.is_dir() and not any(NAMESPACES.iterdir()):
        if _is_mounted(NAMESPACES):
            run("umount", "--no-mtab", str(NAMESPACES))
        with suppress(OSError):
            NAMESPACES.rmdir()


def _is_mounted(path: Path) -> bool:
    return any(line.split()[4] == str(path) for line in Path("/proc/self/mountinfo").read_text().splitlines())
