"""The first probe of `auto3d doctor`: ranks meet, check an all-reduce, and measure its bandwidth.

The ranks run on this machine or on the nodes of a SLURM job.
"""

import logging
import os
import time
from dataclasses import dataclass, field
from statistics import median

import torch
import torch.distributed as dist

from auto3d.runtime.measurement import Status
from auto3d.runtime.process.world import World, connect, join, new_group
from auto3d.runtime.waiting import waiting_for
from launch.run.ranks import NodeRanks, Report, run_ranks

MEET_S = 60.0
MEASURE_S = 120.0  # limit of the measurement of all sizes
SIZES = (2**12, 2**16, 2**20, 2**24, 2**26, 2**29)  # bytes
LARGEST_ON_CPU = 2**26  # bytes
SIZE_S = 0.5  # time to measure one size; an all-reduce that takes longer is measured once
LONGEST_S = 3.0  # Sizes whose all-reduce is predicted to take longer are skipped.
REPETITIONS = 20  # most all-reduces of one size


@dataclass(frozen=True)
class Rate:
    """Medians over the all-reduces of one size, as deepspeed.comm logs them on the first rank."""

    size_bytes: int
    repetitions: int
    seconds: float
    algorithm_gbit_per_s: float  # size / time
    bus_gbit_per_s: float  # the above times 2 (n - 1) / n: what each link of a ring of n ranks carries


@dataclass(frozen=True)
class AllReduce:
    """The result of the probe."""

    ranks: int
    backend: str
    met: bool = False  # whether the ranks met
    correct: bool = False  # whether every sum was correct
    rates: list[Rate] = field(default_factory=list)
    error: str = ""  # one line


def all_reduce(ranks: int, *, device: str, node: NodeRanks | None = None) -> AllReduce:
    """The result of ``ranks`` ranks, which meet as the ranks of a trial do; the rates are the first rank's.

    All of them run here, unless ``node`` has those that run on this node.
    """
    met: list[bool] = []
    outcome = run_ranks(
        ranks,
        lambda world, report: _measure(world, device, report),
        limit_s=MEET_S + MEASURE_S,
        straggle_s=MEET_S,
        node=node,
        on_report=met.append,
    )
    backend = "nccl" if device == "cuda" else "gloo"
    if outcome.status is not Status.OK:
        lines = outcome.error.splitlines()
        return AllReduce(ranks, backend, met=bool(met), error=lines[-1 if "Traceback" in outcome.error else 0])
    correct, rates = outcome.result
    return AllReduce(ranks, backend, met=True, correct=correct, rates=rates)


def _measure(world: World, kind: str, report: Report) -> tuple[bool, list[Rate]]:
    """Whether all sums were correct, and the rate at each size."""
    os.environ["DS_ACCELERATOR"] = kind  # DeepSpeed would warn if it found no GPU
    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    import deepspeed.comm as comm
    from deepspeed.comm.comm import comms_logger, timers
    from deepspeed.ops import __compatible_ops__ as extensions

    extensions["deepspeed_shm_comm"] = False  # DeepSpeed would compile it here
    device = world.device(kind)
    if kind == "cpu":
        torch.set_num_threads(1)
    join(world, device=device, timeout_s=MEET_S)
    report(True)
    group = new_group(range(world.size), device=device)
    connect(group, device=device, what="all ranks")
    comm.init_distributed(dist.get_backend(), auto_mpi_discovery=False, verbose=False)
    # With its log, DeepSpeed waits for the end of every operation, which is right here because nothing else runs.
    comm.configure(enabled=True, prof_all=False, prof_ops=["all_reduce"], verbose=False)
    correct, once_s, rates = True, 0.0, []
    for before, size in zip((0, *SIZES), SIZES, strict=False):
        if (kind == "cpu" and size > LARGEST_ON_CPU) or (before and once_s * size / before > LONGEST_S):
            break
        with waiting_for(f"an all-reduce of {size} bytes"):
            was_correct, once_s = _sum_once(world, size, device, group)
            correct &= was_correct
            for _ in range(max(1, min(REPETITIONS, int(SIZE_S / once_s)))):
                comm.all_reduce(torch.zeros(size // 4, device=device), group=group)
                timers("all_reduce").reset()  # without this it logs the sum of all times so far
        count, milliseconds, throughput, bus = comms_logger.get_raw_data()["all_reduce"][size]
        comms_logger.reset_data()
        rates.append(
            Rate(
                size_bytes=size,
                repetitions=count,
                seconds=median(milliseconds) / 1e3,
                algorithm_gbit_per_s=median(throughput) / 2,  # DeepSpeed counts bytes both as sent and as received
                bus_gbit_per_s=median(bus),
            )
        )
    return correct, rates


def _sum_once(world: World, size: int, device: torch.device, group: dist.ProcessGroup) -> tuple[bool, float]:
    """Whether an all-reduce is correct on all ranks, and the seconds of the slowest rank.

    The first all-reduce of a size is slower than those that follow.
    """
    pattern = torch.arange(size // 4, device=device, dtype=torch.float32) % 97
    tensor = pattern + world.rank + 1
    start = time.monotonic()
    dist.all_reduce(tensor, group=group)
    correct = torch.equal(tensor, world.size * pattern + world.size * (world.size + 1) // 2)
    worst = torch.tensor([float(not correct), time.monotonic() - start], dtype=torch.float64)
    dist.all_reduce(worst, op=dist.ReduceOp.MAX)
    return worst[0].item() == 0, worst[1].item()
