"""Merak's sharding: its subgraphs, and that running them one after the other gives the model's results."""

import copy
from functools import lru_cache

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import GPT2Config, GPT2LMHeadModel

from auto3d.capture.export import InputSpec
from auto3d.capture.graph import Graph
from auto3d.capture.model import CapturedModel, capture
from auto3d.data import Batches
from auto3d.partition.merak import Sharding, common_nodes, shard, sharding_bounds
from auto3d.partition.stage import PartitionError, cut
from auto3d.plan import stages_between
from auto3d.runtime.randomness import Randomness
from auto3d.runtime.stage.build import build_stage
from auto3d.runtime.stage.program import ProgramOfStage
from tests.models import MODELS, captured
from tests.soak import soak

CPU = torch.device("cpu")
MICRO_BATCH_SIZE = 4


@lru_cache
def gpt2_of_48_layers() -> Graph:
    config = GPT2Config(n_layer=48, n_embd=1600, n_head=25, n_positions=1024, use_cache=False)
    specs = {name: InputSpec(shape=(1024,), dtype=torch.int64) for name in ("input_ids", "labels")}
    return capture(lambda: GPT2LMHeadModel(config), specs, 1).graph


def live(graph: Graph, position: int) -> set[str]:
    """Values that operations before ``position`` make and later ones use; repeated operations do not count."""
    made = {v.name for node in graph.nodes[:position] if not node.from_inputs for v in node.outputs}
    return made & {name for node in graph.nodes[position:] for name in node.reads}


def modules(graph: Graph, positions: range) -> set[str]:
    """Paths of the modules with parameters at these positions."""
    return {graph.nodes[p].module for p in positions if graph.parameters.keys() & set(graph.nodes[p].state)}


def test_gpt2_with_48_layers_is_98_subgraphs():
    graph = gpt2_of_48_layers()
    sharding = shard(graph, 98)
    found = [modules(graph, positions) for positions in sharding.subgraphs]
    expected = [{"transformer.wte", "transformer.wpe"}]
    for layer in range(48):
        own = f"transformer.h.{layer}"
        expected.append({f"{own}.ln_1", f"{own}.attn.c_attn", f"{own}.attn.c_proj"})
        expected.append({f"{own}.ln_2", f"{own}.mlp.c_fc", f"{own}.mlp.c_proj"})
    expected.append({"transformer.ln_f", "lm_head"})
    assert found == expected
    assert all(len(live(graph, bound)) == 1 for bound in sharding.bounds[1:-1])
    assert sharding.first_user == {"input_ids": 0, "labels": 97}


def test_any_number_of_subgraphs_up_to_the_most_of_48_layers():
    graph = gpt2_of_48_layers()
    most = len(shard(graph).subgraphs)
    finest = set(shard(graph).bounds)
    for count in range(1, most + 1):
        bounds = shard(graph, count).bounds
        assert len(bounds) == count + 1
        assert finest.issuperset(bounds)
    with pytest.raises(PartitionError, match=f"{most + 1} subgraphs, .* at most {most}"):
        shard(graph, most + 1)


@pytest.mark.parametrize("model", MODELS)
def test_subgraphs_are_a_sequence(model):
    """Each has parameters and operations, and uses only the previous one's output, common values and graph inputs."""
    graph = captured(model, 2).graph
    sharding = shard(graph)
    assert [p for positions in sharding.subgraphs for p in positions] == list(range(len(graph.nodes)))
    assert all(modules(graph, positions) for positions in sharding.subgraphs)
    for bound in sharding.bounds[1:-1]:
        passed = live(graph, bound) - sharding.common.keys()
        assert len(passed) <= 1
        assert passed <= {value.name for value in graph.nodes[bound - 1].outputs}
    for buffer in graph.written_buffers:
        users = {i for i, own in enumerate(sharding.subgraphs) for p in own if buffer in graph.nodes[p].state}
        assert len(users) == 1


@pytest.mark.parametrize(
    ("model", "most"), [("gpt2", 1), ("bert", 1), ("vit", 1), ("llama", 1), ("swin", 1), ("resnet", 1), ("t5", 3)]
)
def test_few_tensors_pass_between_blocks(model, most):
    graph = captured(model, 2).graph
    sharding = shard(graph)
    assert max(len(live(graph, bound)) for bound in sharding.bounds[1:-1]) == most


def test_common_nodes_of_t5_are_the_encoders_output_and_both_position_biases():
    graph = captured("t5", 2).graph
    makers = [graph.nodes[graph.producer[name]].module for name in common_nodes(graph)]
    assert [(path.split(".")[0], path.split(".")[-1]) for path in makers] == [
        ("encoder", "SelfAttention"),
        ("decoder", "SelfAttention"),
        ("encoder", "dropout"),
    ]
    # each layer's keys and values
    assert list(common_nodes(graph).values()) == [2, 2, 4]


@pytest.mark.parametrize("model", ["gpt2", "t5", "swin", "resnet", "averaging"])
def test_subgraphs_at_a_threshold_are_joined_ones_of_the_finest(model):
    """Each bound is the first past the threshold, although algorithm 2 closes and reopens subgraphs on its way."""
    graph = captured(model, 2).graph
    before = [0]
    for node in graph.nodes:
        before.append(before[-1] + sum(graph.parameters[name].bytes for name in node.state if name in graph.parameters))
    common = common_nodes(graph)
    finest = sharding_bounds(graph, common, before, threshold=0)
    for part in range(1, 40):
        threshold = before[-1] / part
        expected = [0]
        for bound in finest:
            if before[bound] - before[expected[-1]] > threshold:
                expected.append(bound)
        expected = [*expected[: -1 if len(expected) > 1 else 1], len(graph.nodes)]
        assert sharding_bounds(graph, common, before, threshold=threshold) == expected


# Running them


def counts(sharding: Sharding) -> list[int]:
    """Numbers of subgraphs: 2, the most, and some between."""
    most = len(sharding.subgraphs)
    wanted = {2, 3, most // 4, most // 2, 3 * most // 4, most - 1, most}
    return sorted(count for count in wanted if 2 <= count <= most)


def run_in_sequence(model: CapturedModel, bounds: tuple[int, ...], module: torch.nn.Module, batch: dict) -> float:
    """Run the stages between ``bounds`` forward and backward; the gradients end up in the module's parameters."""
    stages = cut(model.graph, stages_between(bounds))
    tensors = {**dict(module.named_buffers()), **dict(module.named_parameters()), **model.exported.constants}
    for parameter in module.parameters():
        parameter.grad = torch.zeros_like(parameter)
    randomness = Randomness(1, first_micro_batch=0, micro_batches=1, device=CPU)
    running = [
        build_stage([ProgramOfStage(stage, model)], tensors, loss_weight=1.0, randomness=randomness) for stage in stages
    ]
    values: dict[str, torch.Tensor] = {}
    for stage in running:
        received = {transfer.value.name: values[transfer.value.name] for transfer in stage.stage.received}
        values |= stage.forward(0, received, {name: batch[name] for name in stage.stage.inputs})
    gradients: dict[str, list[torch.Tensor]] = {}
    for stage in reversed(running):
        for name, gradient in stage.backward(0, gradients).items():
            gradients.setdefault(name, []).append(gradient)
    return running[-1].losses[0].item()


def batch_of(model: str) -> dict[str, torch.Tensor]:
    data = MODELS[model][1]
    batches = Batches(data, seed=1, global_batch=8, micro_batch_size=MICRO_BATCH_SIZE)
    return batches.micro_batch(0, 0, tuple(data.inputs))


def assert_equal(found: torch.nn.Module, expected: torch.nn.Module) -> None:
    """Assert that all gradients and buffers agree to 1e-6 of the largest entry of each."""
    buffers = dict(expected.named_buffers())
    gradients = {name: parameter.grad for name, parameter in expected.named_parameters()}
    own = {name: parameter.grad for name, parameter in found.named_parameters()} | dict(found.named_buffers())
    for name, value in {**gradients, **buffers}.items():
        if value is None:
            assert own[name] is None or not own[name].any(), name
        else:
            assert (own[name] - value).abs().max() <= 1e-6 * value.abs().max() + 1e-9, name


ALIKE = ("bert", "bert-pretraining", "llama", "vit")  # chains of blocks, as others are


@pytest.mark.parametrize(
    "model", [*(model for model in MODELS if model not in (*ALIKE, "gpt2-dropout")), *soak(*ALIKE)]
)
def test_the_sequence_computes_what_the_model_computes(model):
    torch.manual_seed(1)
    expected = MODELS[model][0]()
    initial = copy.deepcopy(expected)
    batch = batch_of(model)
    at_size = captured(
        model, MICRO_BATCH_SIZE
    )  # outside the context: a capture records the strides of the kernel that it sees
    with sdpa_kernel(SDPBackend.MATH):
        result = expected(**batch)
        loss = result if isinstance(result, torch.Tensor) else result["loss"]
        loss.backward()
        for count in counts(shard(at_size.graph)):
            module = copy.deepcopy(initial)
            found = run_in_sequence(at_size, shard(at_size.graph, count).bounds, module, batch)
            assert found == pytest.approx(loss.item(), rel=1e-6)
            assert_equal(module, expected)


def test_dropout_is_the_same_in_any_sequence():
    model = captured("gpt2-dropout", MICRO_BATCH_SIZE)
    batch = batch_of("gpt2-dropout")
    torch.manual_seed(1)
    expected = MODELS["gpt2-dropout"][0]()
    initial = copy.deepcopy(expected)
    loss = run_in_sequence(model, (0, len(model.graph.nodes)), expected, batch)
    plain = captured("gpt2", MICRO_BATCH_SIZE)
    without = run_in_sequence(plain, (0, len(plain.graph.nodes)), initial, batch)
    assert abs(loss - without) > 1e-4
    for count in counts(shard(model.graph)):
        module = copy.deepcopy(expected)
        module.zero_grad()
        assert run_in_sequence(model, shard(model.graph, count).bounds, module, batch) == pytest.approx(loss, rel=1e-6)
        assert_equal(module, expected)
