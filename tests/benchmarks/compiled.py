"""Compare stages with and without torch.compile: python -m tests.benchmarks.compiled

Both train the same model on 2 ranks with one thread each, in turn in the same processes: twice as it is and twice
compiled. The time to compile is that of building the rank, beyond the time without.
"""

import os
import sys
import time
from functools import cache
from statistics import median

import torch
from tabulate import tabulate
from torch import nn
from transformers import BertConfig, BertForMaskedLM, GPT2Config, GPT2LMHeadModel

from auto3d.capture.model import CapturedModel, capture
from auto3d.cluster import place_ranks
from auto3d.partition.methods.uniform import uniform
from auto3d.plan import Plan
from auto3d.runtime.process.world import World, join, leave
from auto3d.runtime.rank import build_rank
from auto3d.runtime.settings import OptimizerSettings, TrainingSettings
from launch.report.release import Target
from tests import processes
from tests.benchmarks.runtime import HEADS, HIDDEN, LAYERS, SEQUENCE, TOKENS, VOCABULARY
from tests.targets import end

SAMPLES, MICRO_BATCHES, ITERATIONS = 2, 8, 6


def gpt2() -> nn.Module:
    rates = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    sizes = {"n_layer": LAYERS, "n_embd": HIDDEN, "n_head": HEADS, "n_positions": SEQUENCE, "vocab_size": VOCABULARY}
    return GPT2LMHeadModel(GPT2Config(use_cache=False, bos_token_id=0, eos_token_id=0, **rates, **sizes))


def bert() -> nn.Module:
    sizes = {"hidden_size": HIDDEN, "num_hidden_layers": LAYERS, "num_attention_heads": HEADS}
    rates = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    inner = {"intermediate_size": 4 * HIDDEN, "vocab_size": VOCABULARY}
    return BertForMaskedLM(BertConfig(**sizes, **rates, **inner))


MODELS = {"GPT-2": gpt2, "BERT": bert}


@cache
def captured(model: str) -> CapturedModel:
    return capture(MODELS[model], TOKENS.input_specs(), SAMPLES)


def run(world: World, model: str, plan: Plan, compiled: bool) -> tuple[float, float, float]:
    """Seconds to build this rank, median seconds of an iteration without the first, and the last loss."""
    settings = TrainingSettings(
        iterations=ITERATIONS, optimizer=OptimizerSettings(clip_norm=0.0), compile=compiled, timeout_s=600
    )
    device = torch.device("cpu")
    torch.set_num_threads(1)
    join(world, device=device, timeout_s=600)
    try:
        start = time.perf_counter()
        rank = build_rank(captured(model), plan, settings, TOKENS, world)
        build_s = time.perf_counter() - start
        results = [next(iter(rank.executor.run(program, number))) for number, program in enumerate(rank.programs)]
        return build_s, median(result.seconds for result in results[1:]), results[-1].loss
    finally:
        leave()


def main(models: list[str]) -> None:
    processes.CASE_TIMEOUT_S = 1200
    rows, targets = [], []
    for model in models or MODELS:
        graph = captured(model).graph
        plan = Plan(
            graph=graph.fingerprint,
            dp=1,
            tp=1,
            pp=2,
            global_batch=SAMPLES * MICRO_BATCHES,
            micro_batch_size=SAMPLES,
            schedule="1f1b",
            stages=uniform(graph, 2),
            placement=place_ranks(dp=1, pp=2),
            seed=1,
        )
        with processes.ProcessPool(2) as pool:
            found = [pool.run(2, run, model, plan, compiled) for compiled in (False, True, False, True)]
        plain, fast = (median(max(rank[1] for rank in ranks) for ranks in found[start::2]) for start in (0, 1))
        compile_s = max(rank[0] for rank in found[1]) - max(rank[0] for rank in found[0])
        losses = [ranks[-1][2] for ranks in found]
        assert abs(losses[0] - losses[1]) < 1e-4 * abs(losses[0]), losses
        rows.append((model, plain, fast, plain / fast, compile_s))
        what = f"{model}, speed of compiled stages over others"
        targets.append(Target(what=what, found=plain / fast, wish=1, held=0.8, unit=" ×", least=True))
        columns = ("model", "s/iteration", "compiled", "ratio", "s to compile")
        print(tabulate(rows, columns, floatfmt=".3f", tablefmt="github"), flush=True)
        print("load of the machine:", os.getloadavg())
    end(targets)


if __name__ == "__main__":
    main(sys.argv[1:])
