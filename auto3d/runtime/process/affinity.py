"""Bind a rank to the cores near its GPU, divided among the ranks whose GPUs are near the same cores."""

import os
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

import torch

SYSFS = Path("/sys")


def bind_to_cores_near(device: torch.device, ranks_here: int) -> None:
    """Bind this process to cores near its GPU ``device``. This initialises CUDA.

    One process has forked ``ranks_here`` ranks, this rank included. They divide that process's cores, and use its first
    GPUs, one each. Threads that this process has already started keep their binding.
    """
    devices = range(ranks_here) if device.index < ranks_here <= torch.cuda.device_count() else [device.index]
    addresses = [_pci_address(index) for index in devices]
    os.sched_setaffinity(0, cores_near(addresses, list(devices).index(device.index), os.sched_getaffinity(0)))


def cores_near(addresses: Sequence[str], index: int, allowed: Collection[int], sysfs: Path = SYSFS) -> set[int]:
    """The cores out of ``allowed`` for the rank whose GPU has the PCI address ``addresses[index]``.

    ``addresses`` has the GPUs of all ranks that may use ``allowed``. Ranks near the same cores divide them evenly, in
    whole physical cores. If there are fewer physical cores than ranks, each rank gets all of them. A rank with no
    allowed core near its GPU gets all of ``allowed``.
    """
    near = [_local_cores(address, sysfs) & set(allowed) for address in addresses]
    if not near[index]:
        return set(allowed)
    physical: dict[int, list[int]] = {}
    for core in sorted(near[index]):
        physical.setdefault(_first_thread(core, sysfs), []).append(core)
    sharing = [number for number, cores in enumerate(near) if cores == near[index]]
    position, groups = sharing.index(index), list(physical.values())
    begin, end = (len(groups) * turn // len(sharing) for turn in (position, position + 1))
    cores = {core for group in groups[begin:end] for core in group}
    return cores if len(groups) >= len(sharing) else near[index]


def _pci_address(index: int) -> str:
    """The PCI address of GPU ``index`` as sysfs writes it, such as 0000:3b:00.0."""
    properties: Any = torch.cuda.get_device_properties(index)  # torch's stubs lack the PCI numbers
    return f"{properties.pci_domain_id:04x}:{properties.pci_bus_id:02x}:{properties.pci_device_id:02x}.0"


def _local_cores(address: str, sysfs: Path) -> set[int]:
    """The cores near the PCI device at ``address``; empty if the kernel does not report them."""
    return _numbers(sysfs / "bus/pci/devices" / address / "local_cpulist")


def _first_thread(core: int, sysfs: Path) -> int:
    """The lowest-numbered hardware thread on the physical core of ``core``."""
    siblings = _numbers(sysfs / f"devices/system/cpu/cpu{core}/topology/thread_siblings_list")
    return min(siblings, default=core)


def _numbers(file: Path) -> set[int]:
    """The numbers in a list that the kernel wrote to ``file``, such as 0-3,8; empty if there is no such file."""
    try:
        text = file.read_text().strip()
    except OSError:
        return set()
    ranges = [part.split("-") for part in text.split(",") if part]
    return {number for ends in ranges for number in range(int(ends[0]), int(ends[-1]) + 1)}
