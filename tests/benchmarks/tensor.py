"""Compare tp = 2 with dp = 2 and with torch's parallelize_module: python -m tests.benchmarks.tensor [REPETITIONS]

All three train the same LLaMA on the same samples, with the same weights, loss and optimizer, on two processes with one
thread each, over gloo. They take turns: two wait while one runs. Torch's plan splits what ours splits, each weight
along the same dimension, with the loss computed on split logits; the benchmark checks this, and that the losses agree.
"""

import os
import sys
from collections.abc import Iterable
from dataclasses import replace
from functools import partial
from statistics import median
from typing import Any

import torch
from tabulate import tabulate
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    loss_parallel,
    parallelize_module,
)
from torch.nn import functional
from torch.profiler import ProfilerActivity, profile
from transformers import LlamaConfig, LlamaForCausalLM

from auto3d.capture.model import CapturedModel, capture
from auto3d.capture.skeleton import seed_all
from auto3d.cluster import place_ranks
from auto3d.data import Batches
from auto3d.derived.shards import tensor_parallel
from auto3d.partition.methods.uniform import uniform
from auto3d.plan import Plan
from auto3d.runtime.optimizer.build import build_optimizer
from auto3d.runtime.process.world import World
from auto3d.runtime.rank import build_rank
from auto3d.runtime.replicas import capture_slices
from auto3d.share import Share
from launch.report.release import Target
from tests.benchmarks.runtime import ADAMW, SEED, SETTINGS, TOKENS, Iteration, in_mib, on_ranks, peak_bytes, times
from tests.targets import end

LAYERS, HIDDEN, HEADS, FEED_FORWARD, SEQUENCE, VOCABULARY = 2, 1024, 16, 2816, 128, 2048
MICRO_BATCH_SIZE, MICRO_BATCHES = 4, 4  # the global batch is their product
RANKS = 2
REPETITIONS = 15
LEAST = {"dp 2": 0.9, "torch, tp 2": 1.0}  # throughput of tp 2 over that of another plan
DATA = replace(TOKENS, sequence_length=SEQUENCE, vocabulary_size=VOCABULARY)
COLUMNS = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.gate_proj", "mlp.up_proj")
ROWS = ("self_attn.o_proj", "mlp.down_proj")
PRODUCTS = ("aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm")


def llama() -> LlamaForCausalLM:
    config = LlamaConfig(
        num_hidden_layers=LAYERS, hidden_size=HIDDEN, num_attention_heads=HEADS, num_key_value_heads=HEADS,
        intermediate_size=FEED_FORWARD, vocab_size=VOCABULARY, use_cache=False,
    )  # fmt: skip
    return LlamaForCausalLM(config)


def plan_of(captured: CapturedModel, *, dp: int, tp: int) -> Plan:
    plan = Plan(
        graph=captured.graph.fingerprint,
        dp=dp,
        tp=tp,
        pp=1,
        global_batch=MICRO_BATCHES * MICRO_BATCH_SIZE,
        micro_batch_size=MICRO_BATCH_SIZE,
        schedule="1f1b",
        schedule_options={},
        stages=uniform(captured.graph, 1),
        placement=place_ranks(dp=dp, pp=1, tp=tp),
        seed=SEED,
    )
    return replace(plan, split=tensor_parallel(captured, Share(tp=tp)).split) if tp > 1 else plan


def ours(captured: CapturedModel, plan: Plan, world: World) -> Iteration:
    built = build_rank(captured, plan, SETTINGS, DATA, world)

    def run(iteration: int) -> float:
        (result,) = built.executor.run(built.programs[0], iteration)
        return result.loss

    return run


def style_of(module: str, plan: Plan) -> ParallelStyle | None:
    """How torch splits ``module`` of LLaMA as ``plan`` does; None if it stays whole.

    The inputs of attention and feed-forward are prepared once, so that the gradients of their column-parallel layers
    are summed by one all-reduce, as ours are.
    """
    whole = Replicate()
    if module == "model.embed_tokens":
        by_rows = plan.split["model.embed_tokens.weight"].dim == 0
        return RowwiseParallel(input_layouts=whole) if by_rows else ColwiseParallel(output_layouts=whole)
    if module == "lm_head":
        return ColwiseParallel(output_layouts=Shard(-1), use_local_output=False)
    if module.endswith("self_attn"):
        arguments = {"hidden_states": whole}
        return PrepareModuleInput(input_kwarg_layouts=arguments, desired_input_kwarg_layouts=arguments)
    if module.endswith("mlp"):
        return PrepareModuleInput(input_layouts=whole, desired_input_layouts=whole)
    if module.endswith(COLUMNS):
        return ColwiseParallel()
    return RowwiseParallel() if module.endswith(ROWS) else None


def theirs(plan: Plan, world: World) -> Iteration:
    seed_all(SEED)
    model = llama()
    styles = {name: style_of(name, plan) for name, _ in model.named_modules()}
    parallelize_module(model, init_device_mesh("cpu", (RANKS,)), {n: style for n, style in styles.items() if style})
    parameters = dict(model.named_parameters())
    split = {n: p.placements[0].dim for n, p in parameters.items() if isinstance(p, DTensor)}
    assert split == {name: each.dim for name, each in plan.split.items()}, "torch's plan is another one"
    optimizer, learning_rate = build_optimizer(list(parameters.values()), ADAMW, iterations=SETTINGS.iterations)
    batches = Batches(DATA, seed=SEED, global_batch=plan.global_batch, micro_batch_size=MICRO_BATCH_SIZE)

    def run(iteration: int) -> float:
        optimizer.zero_grad()
        total = torch.zeros(())
        for number in range(MICRO_BATCHES):
            batch = batches.micro_batch(iteration, number, ["input_ids", "labels"])
            shifted = functional.pad(batch["labels"], (0, 1), value=-100)[:, 1:]
            with loss_parallel():
                logits = model(input_ids=batch["input_ids"]).logits
                loss = functional.cross_entropy(logits.flatten(0, 1), shifted.flatten()) / MICRO_BATCHES
                loss.backward()
            total += loss.detach().to_local() if isinstance(loss, DTensor) else loss.detach()
        optimizer.step()
        learning_rate.step()
        return total.item()

    return run


def one_core() -> tuple[float, float]:
    """(Time of one micro-batch through the whole model on one core, in ms; share of it in matrix products)."""
    model = llama()
    tokens = torch.randint(VOCABULARY, (MICRO_BATCH_SIZE, SEQUENCE))

    def run() -> None:
        model(input_ids=tokens, labels=tokens).loss.backward()

    run()
    with profile(activities=[ProfilerActivity.CPU]) as profiled:
        for _ in range(5):
            run()
    own: Iterable[Any] = profiled.key_averages()
    total = sum(event.self_cpu_time_total for event in own)
    return total / 5 / 1000, sum(event.self_cpu_time_total for event in own if event.key in PRODUCTS) / total


def main() -> None:
    torch.set_num_threads(1)
    repetitions = int(sys.argv[1]) if len(sys.argv) > 1 else REPETITIONS
    captured = capture(llama, DATA.input_specs(), MICRO_BATCH_SIZE)
    split, copies = plan_of(captured, dp=1, tp=RANKS), plan_of(captured, dp=RANKS, tp=1)
    capture_slices(captured, split)  # before there are ranks, which inherit it
    systems = {
        "tp 2": partial(ours, captured, split),
        "dp 2": partial(ours, captured, copies),
        "torch, tp 2": partial(theirs, split),
    }
    found = times(systems, RANKS, repetitions)
    for name, one in found.items():
        torch.testing.assert_close(one.losses, found["dp 2"].losses, rtol=1e-4, atol=1e-5, msg=name)
    rows, targets = [], []
    for name, one in found.items():
        ratios = [a / b for a, b in zip(one.seconds, found["tp 2"].seconds, strict=True)]
        samples = MICRO_BATCHES * MICRO_BATCH_SIZE
        if name in LEAST:
            what = f"throughput of tp 2 over {name}"
            targets.append(Target(what=what, found=median(ratios), wish=LEAST[name], unit=" ×", least=True))
        rows.append(
            (
                name,
                f"{samples / median(one.seconds):.1f}",
                f"{samples / max(one.seconds):.1f} to {samples / min(one.seconds):.1f}",
                f"{median(ratios):.3f}",
                f"{median(one.processor_s):.3f}",
                in_mib(on_ranks(RANKS, partial(peak_bytes, systems[name], False))),
            )
        )
    headings = [
        "plan", "samples/s", "slowest to fastest", "throughput of tp 2 / its own", "processor s/iteration",
        "peak MiB of each rank",
    ]  # fmt: skip
    milliseconds, share = one_core()
    print(tabulate(rows, headings, "github", disable_numparse=True))
    print(f"\nLLaMA of {LAYERS} layers × {HIDDEN}, feed-forward {FEED_FORWARD}, {SEQUENCE} tokens, vocabulary")
    print(f"{VOCABULARY}, in {MICRO_BATCHES} micro-batches of {MICRO_BATCH_SIZE}, one of which a core computes in")
    print(f"{milliseconds:.0f} ms, {share:.0%} of it matrix products. Medians of {repetitions} repetitions in turn; a")
    print(f"ratio is the median of those of the repetitions. {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f} at")
    print(f"the end; torch {torch.__version__}.")
    end(targets)


if __name__ == "__main__":
    main()
