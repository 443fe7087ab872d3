"""A description of the cluster that the joined ranks run on, measured in a few seconds, for a search."""

import os
from collections import Counter
from collections.abc import Callable
from dataclasses import replace

import torch
import torch.distributed as dist

from auto3d.cluster import Accelerator, Cluster, Node
from auto3d.runtime.activity import THIS_RANK
from auto3d.runtime.process.arithmetic import capability
from auto3d.runtime.process.world import World
from auto3d.runtime.profile.link_timing import ProfiledRanks, time_communication, time_messages
from auto3d.runtime.waiting import waiting_for

PRODUCT = {"cpu": 1024, "cuda": 8192}  # rows and columns of the timed product
COPIED_BYTES = {"cpu": 2**26, "cuda": 2**30}  # size of the timed copy
ROUNDS = 4  # the fastest counts, because other programs only add time
USABLE = 0.9
"""Part of a device's memory that a process may fill; the CUDA context, NCCL or other programs have the rest."""


def machine(world: World, device: torch.device) -> Cluster:
    """The cluster of all ranks: every device as fast as the slowest. All ranks must call it.

    All ranks time a matrix product and a copy at the same moment, as in training, and ranks 0 and 1 time messages. If
    these two are on different nodes, they time the link between nodes; else that link has the defaults of a
    Node. It is a rough description: ``auto3d calibrate`` measures one that predicts within a few percent.
    """
    ranks = ProfiledRanks(world, device)
    hosts = list(THIS_RANK.hosts)
    memory = -_memory_bytes(device, hosts.count(hosts[world.rank]))
    times = torch.tensor([memory, capability(device) or 0.0, *_device_times(ranks)])
    times = times.double()
    with waiting_for("the other ranks to time their devices"):
        dist.all_reduce(times, dist.ReduceOp.MAX)
    memory, newest, product_s, copy_s = times.tolist()
    accelerator = Accelerator(
        name="measured",
        peak_flops=2 * PRODUCT[device.type] ** 3 / product_s,
        memory_bandwidth=2 * COPIED_BYTES[device.type] / copy_s,
        memory_bytes=-memory,
        capability=newest or None,
        matrix_efficiency=1.0,
        memory_efficiency=1.0,
    )
    node = Node(devices=1, accelerator=accelerator)
    if world.size > 1:
        link = time_messages(ranks).link
        node = replace(node, inside=link) if hosts[0] == hosts[1] else replace(node, outside=link)
    return Cluster(nodes=tuple(replace(node, devices=count) for count in Counter(hosts).values()), device=device.type)


def _device_times(ranks: ProfiledRanks) -> tuple[float, float]:
    """Seconds of a matrix product and of a copy."""
    device = ranks.device
    square = torch.ones(PRODUCT[device.type], PRODUCT[device.type], device=device)
    product = torch.empty_like(square)
    source = torch.ones(COPIED_BYTES[device.type] // 4, device=device)
    target = torch.empty_like(source)

    def fastest(run: Callable[[], object]) -> float:
        times = []
        for _ in range(ROUNDS):
            ranks.barrier()
            times.append(time_communication(run, ranks.clock))
        return min(times)

    return fastest(lambda: torch.mm(square, square, out=product)), fastest(lambda: target.copy_(source))


def _memory_bytes(device: torch.device, ranks_here: int) -> float:
    if device.type == "cuda":
        return USABLE * torch.cuda.mem_get_info(device)[0]
    return USABLE * os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_AVPHYS_PAGES") / ranks_here
