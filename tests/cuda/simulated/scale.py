"""One rank of plans of many ranks on a simulated GPU: python -m tests.cuda.simulated scale

The other ranks do not exist: a store answers for them, collectives of the host are torch's fake ones, and the simulated
NCCL has no peers. Nothing is computed (the empty mode), so what remains is the work of the rank's host. Times are
processor time of its main thread, which other processes of the machine do not add to.
"""

import ctypes
import gc
import json
import os
import time
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from importlib import import_module
from typing import Any, TextIO

import tests.cuda.simulated.memory as empty  # isort: skip  # it says for which device models are captured
import click
import torch
import torch.distributed as dist
import transformers
from tabulate import tabulate

from auto3d.garbage import collect_as_usual
from auto3d.process_memory import status_bytes
from auto3d.runtime.activity import THIS_RANK
from auto3d.runtime.process.world import World, join
from auto3d.runtime.rank import build_rank
from auto3d.runtime.settings import TrainingSettings
from auto3d.schedule import schedule_of
from tests.cuda.simulated.page import made_here
from tests.distributed.parity import ADAMW, make_plan
from tests.models import TRAINED, WIDE_TOKENS, captured, gpt2
from tests.processes import ProcessPool

import_module("torch.testing._internal.distributed.fake_pg")  # it registers the process group "fake"
MODEL = "gpt2-deep"
TRAINED[MODEL] = (partial(gpt2, n_layer=16, n_embd=64, n_head=4, n_positions=64, vocab_size=512), WIDE_TOKENS)
PROGRAMS = 6  # programs that a rank runs; all but the first two are timed
RANKS_PER_NODE = 8
TP, PP = 4, 8
PIPELINES = (1, 2, 16)  # data parallel pipelines, of TP · PP ranks each
KINDS: dict[str, dict[str, Any]] = {
    "1f1b": {},
    "interleaved-1f1b, ZeRO-1": {"schedule": "interleaved-1f1b", "shard_optimizer": True},
}


class AnsweringStore(dist.Store):
    """A store in which every other rank has set each key that this rank waits for."""

    def __init__(self) -> None:
        super().__init__()
        self._values: dict[str, bytes] = {}

    def set(self, key: str, value: bytes | str) -> None:
        self._values[key] = value.encode() if isinstance(value, str) else value

    def get(self, key: str) -> bytes:
        return self._values.get(key, bytes(128))  # the size of NCCL's id of a communicator

    def add(self, key: str, amount: int) -> int:
        self._values[key] = str(int(self._values.get(key, b"0")) + amount).encode()
        return int(self._values[key])

    def check(self, keys: list[str]) -> bool:
        return all(key in self._values for key in keys)

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        """Return at once."""


@dataclass(frozen=True, kw_only=True)
class Taken:
    """What a rank takes of its host and its device."""

    setup_s: float
    groups: int  # process groups that this rank makes
    communicators: int  # NCCL's
    threads: int
    memory: int  # bytes of this process on the host, once it has trained; a process forked from its parent has 0.6 GiB
    allocated: int  # peak bytes on the device
    iteration_s: float
    collection_s: float  # a full collection of garbage looks at what the rank has made
    collection_of_all_s: float  # a collection that also looks at what the process has imported


def measure(_: World, pipelines: int, kind: str, rank: int) -> Taken:
    """What rank ``rank`` of a plan takes."""
    collect_as_usual()  # every rank begins so
    plan = make_plan(MODEL, dp=pipelines, tp=TP, pp=PP, micro_batches=2 * PP, **KINDS[kind])
    world = World(rank=rank, size=plan.ranks, local_rank=rank % RANKS_PER_NODE, meeting_point="")
    device = torch.device("cuda", world.local_rank)
    settings = TrainingSettings(
        iterations=PROGRAMS * schedule_of(plan).iterations,
        optimizer=ADAMW,
        device="cuda",
        threads_per_rank=1,
        timeout_s=120,
    )
    model = captured(MODEL, plan.micro_batch_size)
    torch.cuda.set_device(device)
    store = AnsweringStore()  # C++ alone would not keep its methods
    dist.init_process_group("fake", store=store, rank=rank, world_size=plan.ranks)
    join(world, device=device, timeout_s=120)  # has joined
    THIS_RANK.hosts = [f"node-{each // RANKS_PER_NODE}" for each in range(plan.ranks)]
    begun = time.thread_time()
    built = build_rank(model, plan, settings, TRAINED[MODEL][1], world)
    setup_s = time.thread_time() - begun
    times = []
    for number, program in enumerate(built.programs):
        begun = time.thread_time()
        list(built.executor.run(program, number * program.iterations))
        times.append((time.thread_time() - begun) / program.iterations)
    torch.cuda.synchronize()
    gc.collect()
    collection_s = full_collection_s()
    gc.unfreeze()
    return Taken(
        setup_s=setup_s,
        groups=len(dist.distributed_c10d._world.pg_map),
        communicators=ctypes.CDLL(None).simulated_communicators(),
        threads=len(os.listdir("/proc/self/task")),
        memory=status_bytes("RssAnon"),
        allocated=torch.cuda.max_memory_allocated(device),
        iteration_s=min(times[2:]),
        collection_s=collection_s,
        collection_of_all_s=full_collection_s(),
    )


def full_collection_s() -> float:
    """Seconds of processor time that Python takes to look for garbage among all objects that are not frozen."""
    begun = time.thread_time()
    gc.collect()
    return time.thread_time() - begun


@click.command()
@click.option("--record", type=click.File("w"), help="Write the table to this file (page.py reads it).")
def main(record: TextIO | None) -> None:
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    made = made_here() if record else {}
    rows, right = [], True
    for kind in KINDS:
        counts = []
        for pipelines in PIPELINES:
            ranks = pipelines * TP * PP
            for rank in (0, ranks // 2 + TP + 1, ranks - 1):
                with ProcessPool(1, begin=empty.begin) as pool:
                    [found] = pool.run(1, measure, pipelines, kind, rank)
                counts.append((found.groups, found.communicators, found.threads, found.allocated // empty.MIB))
                sizes = (f"{size / empty.MIB:.1f}" for size in (found.memory, found.allocated))
                seconds = (found.setup_s, found.iteration_s, found.collection_s, found.collection_of_all_s)
                times = (f"{each * 1e3:.0f}" for each in seconds)
                rows.append((kind, ranks, rank, found.groups, found.communicators, found.threads, *sizes, *times))
                print(".", end="", flush=True)
        right &= counts[-3:] == counts[-6:-3]
    columns = (
        *("schedule", "ranks", "rank", "groups", "communicators", "threads"),
        *("host MiB", "device MiB", "set-up ms", "iteration ms", "collection ms", "of all ms"),
    )
    if record is not None:
        json.dump({"columns": columns, "rows": rows, "right": right} | made, record)
    print("\n" + tabulate(rows, columns, disable_numparse=True, colalign=("left", *["right"] * 11)))
    print(f"{'right' if right else 'WRONG'}: counts and device memory of a rank are those of a plan of fewer pipelines")
    raise SystemExit(not right)


if __name__ == "__main__":
    main()
