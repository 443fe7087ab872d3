"""A captured model that was written and read again is the same: its nodes, its Graph, and what follows from both."""

import json

import pytest
import torch
from torch import fx
from torch.utils._pytree import tree_leaves
from transformers import MixtralConfig, MixtralForCausalLM

from auto3d.capture.describe import describe
from auto3d.capture.export import module_path
from auto3d.capture.model import CapturedModel, capture
from auto3d.capture.program_json import NotStorableError, captured_from_json, captured_to_json
from auto3d.derived.local_graph import local_graphs
from auto3d.derived.shards import tensor_parallel
from auto3d.derived.slices import sliced
from auto3d.runtime.verify.eager import _run_program, check_against_eager, one_batch
from auto3d.share import Share
from tests.models import SIZES, TRAINED, captured
from tests.soak import soak

CPU = torch.device("cpu")
FAMILIES = (
    *(
        "gpt2-dropout",
        "bert-pretraining",
        "llama-tied",
        "t5",
        "vit",
        "swin",
        "resnet",
        "residual",
        "reused",
        "averaging",
    ),
    *("two-losses", "gpt2-dropout@bfloat16", "resnet-transformers@bfloat16", "averaging@bfloat16"),
)


def again(model: CapturedModel) -> CapturedModel:
    return captured_from_json(json.loads(json.dumps(captured_to_json(model))), model.exported.build)


def described(value: object) -> list[tuple]:
    """Everything about the tensors of ``value`` but their numbers; a dtype where it has no memory."""
    tensors = [leaf for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor)]
    return [
        (
            each.shape,
            each.stride(),
            each.storage_offset(),
            each.untyped_storage().nbytes(),
            each.dtype,
            each.requires_grad,
        )
        for each in tensors
    ]


def nodes(program: fx.Graph) -> list[tuple]:
    return [
        (
            *(node.op, node.name, node.target, repr(node.args), repr(node.kwargs), [user.name for user in node.users]),
            *(described(node.meta.get("val")), module_path(node), node.meta.get("stack_trace") or ""),
        )
        for node in program.nodes
    ]


def computed(model: CapturedModel, data_of: str) -> dict[str, torch.Tensor]:
    """The loss, the gradients and the written buffers of one micro-batch, by name."""
    torch.manual_seed(0)
    module = model.exported.build().train()
    batch = one_batch(model, TRAINED[data_of][1], seed=1, device=CPU)
    result = _run_program(model, module, batch, CPU)
    gradients = {f"gradient of {name}": each for name, each in result.gradients.items() if each is not None}
    return {"loss": result.loss.detach(), **gradients, **result.buffers}


@pytest.mark.parametrize("name", FAMILIES)
def test_a_model_that_was_read_again_is_the_same(name):
    model = captured(name, 2)
    read = again(model)
    assert read.exported.fingerprint == model.exported.fingerprint
    assert nodes(read.exported.program) == nodes(model.exported.program)
    assert read.graph == model.graph
    assert describe(read.exported) == model.graph
    assert describe(read.exported, fused_attention=False) == describe(model.exported, fused_attention=False)
    ours, theirs = computed(read, name), computed(model, name)
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[each], theirs[each]) for each in ours)
    constants = [(each, described(value)) for each, value in model.exported.constants.items()]
    assert [(each, described(value)) for each, value in read.exported.constants.items()] == constants


def test_a_mixture_of_experts_is_the_same_as_its_module():
    def build() -> MixtralForCausalLM:
        return MixtralForCausalLM(
            MixtralConfig(
                vocab_size=256,
                use_cache=False,
                num_local_experts=4,
                num_key_value_heads=2,
                **SIZES | {"num_hidden_layers": 2},
            )
        )

    read = again(capture(build, TRAINED["llama"][1].input_specs(), 2))
    check_against_eager(read, TRAINED["llama"][1], seed=1, device=CPU)


@pytest.mark.parametrize("sequence_parallel", [True, *soak(False)])
@pytest.mark.parametrize("name", ["llama-grouped-query", *soak("gpt2-4-heads", "t5-4-heads", "vit-4-heads")])
def test_the_shards_of_a_model_that_was_read_again_are_the_same(name, sequence_parallel):
    model = captured(name, 2)
    share = Share(tp=2, sequence_parallel=sequence_parallel)
    ours, theirs = (tensor_parallel(each, share) for each in (again(model), model))
    assert ours.program.graph == theirs.program.graph
    assert ours.placements == theirs.placements
    assert nodes(ours.program.exported.program) == nodes(theirs.program.exported.program)


@pytest.mark.parametrize("name", ["gpt2", *soak("llama")])
def test_the_slices_of_a_model_that_was_read_again_are_the_same(name):
    model = captured(name, 2)
    assert local_graphs(sliced(again(model), 4)) == local_graphs(sliced(model, 4))


def test_a_model_that_calls_a_function_of_the_users_own_is_not_stored():
    with pytest.raises(NotStorableError, match=r"it calls tests\.models\._Round"):
        captured_to_json(captured("straight-through", 2))


def test_a_model_in_evaluation_is_not_stored():
    with pytest.raises(NotStorableError):
        captured_to_json(captured("bert", 2).in_evaluation(("logits",)))


@pytest.mark.parametrize(
    "damage",
    [
        lambda content: content["program"]["nodes"].pop(-2),
        lambda content: content["program"]["nodes"][-2].__setitem__(0, 0),  # the node calls another operator
        lambda content: content.update(trained=content["trained"][1:]),
        lambda content: content["program"]["targets"].__setitem__(0, "aten.absent.default"),
        lambda content: content["program"]["targets"].__setitem__(0, "load_library.__globals__.os"),
        lambda content: content["program"]["values"][0].__setitem__(1, "load"),
        lambda content: content.update(constants={"one": ["float32", [1], [1], "AACAPw=="]}),
    ],
)
def test_another_program_than_its_graphs_is_refused(damage):
    model = captured("gpt2", 2)
    content = json.loads(json.dumps(captured_to_json(model)))
    damage(content)
    with pytest.raises((ValueError, LookupError)):
        captured_from_json(content, model.exported.build)


def test_what_layers_share_is_written_once():
    """4 layers of GPT-2, with its Graph: a program of 96 layers takes 1.7 MB."""
    model = captured("gpt2", 2)
    content = captured_to_json(model)
    nodes = len(model.exported.program.nodes)
    assert len(json.dumps(content["program"], separators=(",", ":"))) < 250 * nodes
    assert len(json.dumps(content, separators=(",", ":"))) < 500 * nodes
    assert len(content["program"]["values"]) < nodes
