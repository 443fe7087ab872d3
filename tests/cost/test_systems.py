"""The bytes that other systems hold, against closed forms counted by hand from their sources and from papers."""

from dataclasses import replace
from functools import cache

import numpy as np
import pytest
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

from auto3d.capture.graph import Graph
from auto3d.capture.model import CapturedModel, capture
from auto3d.cluster import Accelerator
from auto3d.cost.system_bytes import norms_of
from auto3d.cost.systems import DEEPSPEED, MEGATRON, MEGATRON_TE, NANOTRON, TORCH, System
from auto3d.cost.times import times_of
from auto3d.cost.work import Work, work_of, work_of_local
from auto3d.derived.local_graph import LocalGraph, local_graphs
from auto3d.derived.of_share import derived
from auto3d.derived.planned_split import planned_split
from auto3d.partition.merak import shard
from auto3d.share import Share
from tests.cost.test_model import tokens

B, S, H, HEADS, FFN, VOCABULARY = 2, 32, 64, 4, 128, 512
UNCACHED = {"use_cache": False, "bos_token_id": 0, "eos_token_id": 0}
SBH = S * B * H
STATISTICS = 2 * 2 * 4 * S * B  # mean and deviation of two layer norms, float32
LSE = 4 * HEADS * S * B  # log-sum-exp of fused attention


def gpt(layers: int) -> GPT2LMHeadModel:
    return GPT2LMHeadModel(
        GPT2Config(n_layer=layers, n_embd=H, n_head=HEADS, vocab_size=VOCABULARY, n_positions=S, **UNCACHED)
    )


def llama(layers: int, kv_heads: int = HEADS) -> LlamaForCausalLM:
    return LlamaForCausalLM(
        LlamaConfig(
            num_hidden_layers=layers,
            hidden_size=H,
            num_attention_heads=HEADS,
            num_key_value_heads=kv_heads,
            intermediate_size=FFN,
            vocab_size=VOCABULARY,
            max_position_embeddings=S,
            **UNCACHED,
        )
    )


@cache
def captured(model, *arguments: int) -> CapturedModel:
    return capture(lambda: model(*arguments), tokens(VOCABULARY, S).input_specs(), B)


def saved(graph: Graph, system: System) -> float:
    return float(work_of(graph, shard(graph).bounds, precision="float16", system=system).saved.sum())


def of_a_layer(model, system: System, *arguments: int) -> float:
    """Bytes that one layer saves: those of two layers less those of one."""
    one, two = (captured(model, layers, *arguments).graph for layers in (1, 2))
    return saved(two, system) - saved(one, system)


@cache
def split_graph(layers: int, shards: int, sequence_parallel: bool) -> LocalGraph:
    whole = captured(gpt, layers)
    share = Share(tp=shards, sequence_parallel=sequence_parallel)
    return local_graphs(derived(whole, share, split=planned_split(whole, share, rules={})))[0]


def of_a_split_layer(system: System, shards: int, *, sequence_parallel: bool) -> float:
    """Bytes that one rank saves of one layer of GPT."""
    totals = []
    for layers in (1, 2):
        whole, local_one = captured(gpt, layers), split_graph(layers, shards, sequence_parallel)
        work = work_of(whole.graph, shard(whole.graph).bounds, precision="float16", system=system)
        local = work_of_local(work, local_one, precision="float16", system=system)
        totals.append(float(local.saved.sum()))
    return totals[1] - totals[0]


def test_a_layer_of_gpt_saves_what_korthikanti_et_al_count():
    """Equation 1: s b h (34 + 5 a s / h); FlashAttention keeps the log-sum-exp instead of the last term."""
    assert of_a_layer(gpt, DEEPSPEED) == SBH * (34 + 5 * HEADS * S / H) + STATISTICS
    assert of_a_layer(gpt, MEGATRON) == SBH * 34 + STATISTICS + LSE


@pytest.mark.parametrize("shards", [2, 4])
def test_tensor_and_sequence_parallel_layers_save_what_korthikanti_et_al_count(shards):
    """Equation 2: s b h (10 + 24/t + 5 a s / (h t)); equation 4: s b h / t (34 + 5 a s / h)."""
    alone = of_a_split_layer(DEEPSPEED, shards, sequence_parallel=False)
    assert alone == SBH * (10 + 24 / shards + 5 * HEADS * S / H / shards) + STATISTICS
    both = of_a_split_layer(DEEPSPEED, shards, sequence_parallel=True)
    assert both == SBH * (34 + 5 * HEADS * S / H) / shards + STATISTICS / shards


def test_a_layer_of_llama_saves_what_each_system_keeps():
    """Bytes per token by hand.

    Two norms keep their inputs (4h) and feed products (4h); queries, keys and values 6h, the attention's result 2h.
    The gate, the other projection and their product 6f; nanotron, without a fused kernel, also silu(gate), and its
    queries hold the packed projection, beside a copy of keys and values.
    """
    token, rest = S * B, LSE
    assert of_a_layer(llama, MEGATRON) == token * (16 * H + 6 * FFN) + rest
    assert of_a_layer(llama, NANOTRON) == token * (20 * H + 8 * FFN) + rest
    grouped = token * ((8 + 2 + 2) * H + 4 * H // HEADS + 6 * FFN) + rest
    assert of_a_layer(llama, MEGATRON, 1) == grouped
    # transformers' own norms keep, beside their inputs, the normalised values and one number per token
    assert of_a_layer(llama, TORCH) == token * (20 * H + 8 * FFN) + rest + 2 * 2 * token


def test_gathered_inputs_stay_only_where_a_system_keeps_them():
    """Two inputs of products are gathered per layer: whole where they stay, else a shard."""
    kept = of_a_split_layer(NANOTRON, 2, sequence_parallel=True)
    again = of_a_split_layer(replace(NANOTRON, keeps_gathered=False), 2, sequence_parallel=True)
    assert kept - again == 2 * 2 * SBH * (1 - 1 / 2)


def test_transformer_engine_holds_one_unused_gradient_for_each_shape_of_weights():
    """Queries, keys and values are one tensor, so are gate and its partner; the head's comes with its backward."""
    graph = captured(llama, 2).graph
    work = work_of(graph, shard(graph).bounds, precision="bfloat16", system=MEGATRON_TE)
    assert sorted(size for size, _ in work.shared) == sorted(2 * H * n for n in (3 * H, H, 2 * FFN, FFN))
    assert sum(len(users) for _, users in work.shared) == 2 * 7
    head = max(position for position, node in enumerate(graph.nodes) if node.flops and node.state)
    assert work.working[head] == 2 * (VOCABULARY * H + S * B * (VOCABULARY + H))


def test_attention_of_several_kernels_moves_its_weights_again_and_again():
    """Bytes per weight as counted in auto3d/cost/system_times.py; none where its softmax or all of it is one kernel."""
    graph = captured(gpt, 1).graph
    weights = B * HEADS * S * S

    def moved(system: System, **how: bool) -> tuple[float, float]:
        work = work_of(graph, shard(graph).bounds, precision="float16", system=system, **how)
        return float(work.moved.sum()), float(work.backward_moved.sum())

    quiet = replace(DEEPSPEED, times=replace(DEEPSPEED.times, attention_moved=None))
    forward, backward = moved(quiet, fused_attention=False)
    assert moved(DEEPSPEED, fused_attention=False) == pytest.approx((forward + 28 * weights, backward + 89 * weights))
    for how in ({"fused_attention": True}, {"fused": True, "fused_attention": False}):
        assert moved(DEEPSPEED, **how) == moved(quiet, **how)


def test_products_of_an_eager_backward_are_as_slow_as_its_system_has_them():
    """Without the products, the times of the backward stay as they are."""
    graph = captured(gpt, 1).graph
    device = Accelerator(half_flops=0.0, launch_s=0.0)

    def backward(system: System, **how: bool) -> tuple[float, float]:
        work = work_of(graph, shard(graph).bounds, precision="float16", system=system, **how)
        return times_of(work, device).backward[-1], work.backward_flops.sum() / device.peak_flops / 0.6

    level = replace(DEEPSPEED, times=replace(DEEPSPEED.times, eager_backward=1.0))
    (slow, products), (fast, _) = (backward(each, fused_attention=False) for each in (DEEPSPEED, level))
    assert slow - fast == pytest.approx(products * (1 / 0.27 - 1))
    assert backward(DEEPSPEED, fused_attention=True) == backward(level, fused_attention=True)


@pytest.mark.parametrize("fused", [True, False])
def test_eager_norms_move_float32_values_once_for_each_operator(fused):
    """36 and 92 bytes per element and 8 and 14 kernels; a system with fused norms keeps what the model has."""
    graph = captured(llama, 1).graph

    def work(system: System) -> Work:
        return work_of(graph, shard(graph).bounds, precision="bfloat16", fused=fused, system=system)

    eager, others = work(TORCH), work(replace(TORCH, fused_norms=True))
    norms = norms_of(graph)
    assert len(norms) == 3, "two of the layer, and the last"
    for norm in norms:
        figures = (eager.moved, eager.backward_moved, eager.launches, eager.backward_launches)
        assert [each[norm].sum() for each in figures] == [36 * SBH, 92 * SBH, 8, 14]
        assert others.moved[norm].sum() < 18 * SBH
    rest = np.setdiff1d(np.arange(len(eager)), np.concatenate(norms))
    assert (eager.moved[rest] == others.moved[rest]).all()
