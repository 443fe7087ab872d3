"""Which cores a rank runs on: those near its GPU, shared with the ranks whose GPUs are near the same cores."""

import os
from collections.abc import Collection, Sequence
from pathlib import Path

import torch

SYSFS = Path("/sys")


def bind_to_cores_near(device: torch.device, ranks_here: int) -> None:
    """Bind this process to cores near its GPU ``device``; it starts CUDA.

    ``ranks_here`` ranks, this one among them, were forked by one process and may use its cores: they have the first
    GPUs, one each. Threads that this process has started already stay where they are.
    """
    devices = range(ranks_here) if device.index < ranks_here <= torch.cuda.device_count() else [device.index]
    addresses = [_pci_address(index) for index in devices]
    os.sched_setaffinity(0, cores_near(addresses, list(devices).index(device.index), os.sched_getaffinity(0)))


def cores_near(addresses: Sequence[str], own: int, allowed: Collection[int], sysfs: Path = SYSFS) -> set[int]:
    """The cores of ``allowed`` for the rank whose GPU has the PCI address ``addresses[own]``.

    The ranks of all ``addresses`` may use ``allowed``. Those near the same cores share them evenly, in whole physical
    cores. They are all for each where they are too few, and so is all of ``allowed`` where none of it is near.
    """
    near = [_local_cores(address, sysfs) & set(allowed) for address in addresses]
    if not near[own]:
        return set(allowed)
    physical: dict[int, list[int]] = {}
    for core in sorted(near[own]):
        physical.setdefault(_first_thread(core, sysfs), []).append(core)
    sharing = [number for number, cores in enumerate(near) if cores == near[own]]
    position, groups = sharing.index(own), list(physical.values())
    begin, end = (len(groups) * turn // len(sharing) for turn in (position, position + 1))
    mine = {core for group in groups[begin:end] for core in group}
    return mine if len(groups) >= len(sharing) else near[own]


def _pci_address(index: int) -> str:
    """As sysfs writes it: 0000:3b:00.0."""
    properties = torch.cuda.get_device_properties(index)
    return f"{properties.pci_domain_id:04x}:{properties.pci_bus_id:02x}:{properties.pci_device_id:02x}.0"


def _local_cores(address: str, sysfs: Path) -> set[int]:
    """Those near the PCI device; none where the kernel does not say."""
    return _numbers(sysfs / "bus/pci/devices" / address / "local_cpulist")


def _first_thread(core: int, sysfs: Path) -> int:
    """The first of the hardware threads that share a physical core with ``core``."""
    siblings = _numbers(sysfs / f"devices/system/cpu/cpu{core}/topology/thread_siblings_list")
    return min(siblings, default=core)


def _numbers(file: Path) -> set[int]:
    """The kernel's list of numbers, as in 0-3,8; none where there is no such file."""
    try:
        text = file.read_text().strip()
    except OSError:
        return set()
    ranges = [part.split("-") for part in text.split(",") if part]
    return {number for ends in ranges for number in range(int(ends[0]), int(ends[-1]) + 1)}
