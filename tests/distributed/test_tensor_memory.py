"""Memory of the ranks of a tensor-parallel group: what they hold of split weights and of halves of micro-batches."""

import ctypes
from dataclasses import replace
from functools import cache

import pytest
import torch.distributed as dist
from transformers import GPT2Config, GPT2LMHeadModel

from auto3d.capture.model import CapturedModel, capture
from auto3d.cluster import place_ranks
from auto3d.derived.shards import tensor_parallel
from auto3d.partition.methods.uniform import uniform
from auto3d.plan import Plan
from auto3d.runtime import rank as rank_module
from auto3d.runtime.process.world import World, join, leave
from auto3d.runtime.rank import build_rank
from auto3d.runtime.replicas import capture_slices
from auto3d.runtime.settings import TrainingSettings
from auto3d.runtime.watch.peak_memory import PeakMemory
from auto3d.share import Share
from tests.distributed.parity import CPU, SGD
from tests.memory_grid import Cell, compare
from tests.models import TOKENS
from tests.processes import ProcessPool
from tests.soak import soak

M_MMAP_THRESHOLD = -3  # mallopt(3): allocations from this size on get separate pages
COPIES = 2  # weights and gradients: the optimizer keeps nothing
PLAIN_SGD = replace(SGD, momentum=0.0)
DATA = replace(TOKENS, sequence_length=16, vocabulary_size=1024)
SLACK = 15e6  # activations, buffers of gloo


def wide_gpt2() -> GPT2LMHeadModel:
    sizes = {"n_layer": 4, "n_embd": 768, "n_head": 8, "n_positions": 16, "vocab_size": 1024}
    return GPT2LMHeadModel(GPT2Config(use_cache=False, bos_token_id=0, eos_token_id=0, **sizes))


@cache
def captured() -> CapturedModel:
    """Made before the ranks are forked, which inherit it."""
    return capture(wide_gpt2, DATA.input_specs(), 1)


def plan_of(tp: int) -> Plan:
    graph = captured().graph
    plan = Plan(
        graph=graph.fingerprint,
        dp=1,
        tp=tp,
        pp=1,
        global_batch=2,
        micro_batch_size=1,
        schedule="1f1b",
        schedule_options={},
        stages=uniform(graph, 1),
        placement=place_ranks(dp=1, pp=1, tp=tp),
        seed=5,
    )
    if tp > 1:
        plan = replace(plan, split=tensor_parallel(captured(), Share(tp=tp)).split)
        capture_slices(captured(), plan)
    return plan


def peak_bytes(world: World, plan: Plan) -> int:
    """Growth of this rank from before it makes its weights to the end of its third iteration.

    Every larger tensor has separate pages, so that fragments of the heap do not count.
    """
    ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, 2**16)
    rank_module.keep_freed_memory = lambda: None  # it would move tensors to the heap again
    settings = TrainingSettings(iterations=3, optimizer=PLAIN_SGD, device="cpu", threads_per_rank=1, timeout_s=60)
    join(world, device=CPU, timeout_s=60)
    try:
        memory = PeakMemory(CPU)
        rank = build_rank(captured(), plan, settings, DATA, world)
        for iteration, program in enumerate(rank.programs):
            list(rank.executor.run(program, iteration))
        dist.barrier()
        return memory.bytes()
    finally:
        leave()


@pytest.mark.soak
def test_peak_memory_is_the_share_of_what_is_split_and_what_is_whole():
    sizes = {name: value.bytes for name, value in captured().graph.parameters.items()}
    total, largest = sum(sizes.values()), max(sizes.values())
    plans = {tp: plan_of(tp) for tp in (1, 2, 4)}
    with ProcessPool(4) as pool:
        peaks = {tp: pool.run(tp, peak_bytes, plan) for tp, plan in plans.items()}
    assert peaks[1][0] > COPIES * total, "a whole model counts"
    for tp in (2, 4):
        split = sum(sizes[name] for name in plans[tp].split)
        assert split > 0.95 * total
        share = COPIES * (split / tp + total - split)
        for peak in peaks[tp]:
            assert share < peak < share + 2 * largest + SLACK, f"tp {tp}"


@pytest.mark.parametrize("cell", [
    Cell(model="gpt2-wide", pp=1, tp=2, sub_pipelined=True),
    Cell(model="llama-wide", pp=1, tp=2, sub_pipelined=True, sequence_parallel=True),
    *soak(Cell(model="t5-wide", pp=2, tp=2, sub_pipelined=True, recompute=0.0)),
], ids=str)  # fmt: skip
def test_halves_of_a_micro_batch_take_no_more_than_is_predicted_for_the_whole(processes, cell):
    """A piece of a stage that joins the halves must let go of each once it has used it."""
    for each in compare(processes, cell):
        assert each.error > -0.01, f"{each.error:.1%} at {each.peak.at}"
