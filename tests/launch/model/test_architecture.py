"""Models of transformers from a recipe: the keys that their configurations take, and the inputs of every kind."""

import json
import re
import sys
from pathlib import Path

import pytest
import torch
import yaml

from auto3d.data import KINDS
from auto3d.errors import InputError
from launch.model.architecture import architecture
from launch.model.build import build_function, captured_model
from launch.recipe.data_schema import INPUT_KEYS
from launch.recipe.load import RecipeError, load
from tests.soak import soak

PUBLISHED = json.loads(Path(__file__).with_name("published_configurations.json").read_text())  # config.json of each
PAGE = (Path(__file__).parents[3] / "docs" / "models.md").read_text()
DOCUMENTED = {
    recipe["model"]["architecture"]: recipe
    for recipe in map(yaml.safe_load, re.findall(r"```yaml\n(.*?)```", PAGE, re.S))
}
HOW = {"training": {"global_batch": 4, "iterations": 2}, "launch": {"executor": "local"}}
T5 = DOCUMENTED["T5ForConditionalGeneration"]["model"]["config"]
BART = {
    "vocab_size": 256, "d_model": 16, "max_position_embeddings": 64, "pad_token_id": 0, "bos_token_id": 1,
    "eos_token_id": 2, "forced_eos_token_id": 2, "decoder_start_token_id": 0,
    **{f"{part}_{size}": 2 for part in ("encoder", "decoder") for size in ("layers", "attention_heads")},
    "encoder_ffn_dim": 32, "decoder_ffn_dim": 32,
}  # fmt: skip
MASKED = {
    "input_ids": {"kind": "tokens"},
    "labels": {"kind": "tokens"},
    "attention_mask": {"kind": "constant", "shape": [16]},
}


def of(name: str, config: dict, inputs: dict | None = None, **model: object) -> dict:
    data = {"sequence_length": 16, **({"inputs": inputs} if inputs else {})}
    return {"model": {"architecture": name, "config": config, **model}, "data": data}


SIGLIP = DOCUMENTED["CLIPModel"]["model"]["config"]
LONG_ALIKE = [  # `make zoo` also trains each of them
    of("MT5ForConditionalGeneration", T5),
    of("UMT5ForConditionalGeneration", T5),
    of("LongT5ForConditionalGeneration", {**T5, "local_radius": 4}, MASKED),
    of("MBartForConditionalGeneration", BART),
    of("PegasusForConditionalGeneration", BART),
    of("BartForConditionalGeneration", BART),
]
ALIKE = [
    *soak(*LONG_ALIKE),
    of("MarianMTModel", {**BART, "decoder_vocab_size": 256}),
    {
        **DOCUMENTED["CLIPModel"],
        "model": {
            "architecture": "SiglipModel",
            "config": {key: SIGLIP[key] for key in ("text_config", "vision_config")},
            "forward": {"return_loss": True},
        },
    },
]


@pytest.fixture
def recipe(tmp_path, monkeypatch):
    """The recipe of these groups, in a file of its own."""
    monkeypatch.chdir(tmp_path)

    def write(groups: dict, *overrides: str):
        Path("mine.yaml").write_text(yaml.safe_dump({**HOW, **groups}))
        return load("mine.yaml", overrides)

    return write


TRAINED = ("T5ForConditionalGeneration", "CLIPModel")  # text, images beside it


@pytest.mark.parametrize("name", [*TRAINED, *soak(*(name for name in DOCUMENTED if name not in TRAINED))])
def test_documented_recipes_train_on_two_stages_as_on_one(recipe, auto3d, name):
    recipe(DOCUMENTED[name])
    losses = []
    for stages in (1, 2):
        record = json.loads(auto3d("train", "mine.yaml", f"plan.pp={stages}", "plan.micro_batch_size=2", "--json").out)
        losses.append(record["loss"])
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)


def test_all_documented_recipes_give_a_model(recipe):
    for name, groups in DOCUMENTED.items():
        assert type(architecture(recipe(groups))()).__name__ == name


@pytest.mark.parametrize("groups", ALIKE, ids=lambda groups: groups["model"]["architecture"])
def test_models_alike_are_captured(recipe, groups):
    graph = captured_model(recipe(groups), 2).graph
    assert graph.inputs.keys() >= {"input_ids"}
    assert graph.trained


LLAMA = {
    "vocab_size": 256,
    "hidden_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 32,
}
MIXTRAL = {**LLAMA, "num_key_value_heads": 2, "num_local_experts": 2, "num_experts_per_tok": 1}
VISION = DOCUMENTED["CLIPModel"]


def without(config: dict, *keys: str) -> dict:
    return {key: value for key, value in config.items() if key not in keys}


def without_start(groups: dict) -> dict:
    model = groups["model"]
    return {**groups, "model": {**model, "config": without(model["config"], "decoder_start_token_id")}}


VED, LLAVA, W2V, MASKED_VIT = (
    DOCUMENTED[name]
    for name in (
        "VisionEncoderDecoderModel",
        "LlavaForConditionalGeneration",
        "Wav2Vec2ForSequenceClassification",
        "ViTForMaskedImageModeling",
    )
)
SEQ2SEQ, CAUSAL = DOCUMENTED["T5ForConditionalGeneration"], of("LlamaForCausalLM", LLAMA)
EXPERTS = of("MixtralForCausalLM", MIXTRAL)
EFFICIENT = of("EfficientNetForImageClassification", {}, {"pixel_values": {"kind": "normal", "shape": [3, 600, 600]}})
QWEN = of("Qwen3MoeForCausalLM", {**LLAMA, "num_key_value_heads": 1, "num_experts": 2, "num_experts_per_tok": 1})
PUBLIC = of("DeepseekV3ForCausalLM", PUBLISHED["deepseek-v3"]["config"])
START = "model.config.decoder_start_token_id: "
TEXT = "model.config.text_config."
REFUSED = [
    (without_start(SEQ2SEQ), "", [START + "none given", "needs it", "such as 0"]),
    (without_start(VED), "", [START + "none given"]),
    (without_start(of("MarianMTModel", BART)), "", [START + "found 58100; the model has 256 tokens"]),
    (SEQ2SEQ, "model.config.decoder_start_token=0", ["did you mean decoder_start_token_id"]),
    (SEQ2SEQ, "model.config.hidden_size=32", ["hidden_size: found 32; it is d_model, which is 16"]),
    (SEQ2SEQ, "model.config.to_dict=3", ["model.config.to_dict: unknown"]),
    (SEQ2SEQ, "model.config.model_type=bart", ["found 'bart'", "has 't5': leave it out"]),
    (VISION, f"{TEXT}hiden_size=3", [TEXT + "hiden_size: unknown; did you mean hidden_size? CLIPTextConfig"]),
    (
        VISION,
        f"{TEXT}vocab_size=100",
        [TEXT + "vocab_size: found 100; it must be at least 256, the number of different tokens in the data"],
    ),
    (
        VISION,
        "data.sequence_length=17",
        ["data.sequence_length: found 17; it must be at most 16: the model has 16 positions"],
    ),
    (LLAVA, f"{TEXT}model_type=lama", [TEXT + "model_type: found 'lama'"]),
    (
        LLAVA,
        "data.inputs.input_ids.prefix=300",
        ["input_ids: found ids up to 300; they must be below 300, the number of tokens of the model"],
    ),
    (CAUSAL, "model.config.attn_implementation=fast", ["attn_implementation: found 'fast'", "eager, sdpa"]),
    (CAUSAL, "model.config.experts_implementation=eager", ["experts_implementation: found 'eager'", "leave it out"]),
    (EXPERTS, "model.config.experts_implementation=fast", ["'fast'", "batched_mm", "grouped_mm"]),
    (VISION, "model.forward.return_los=true", ["model.forward.return_los: unknown; did you mean return_loss?"]),
    (VISION, "model.forward.input_ids=true", ["model.forward.input_ids: is also one of data.inputs"]),
    (VISION, "data.inputs.pixel_value.kind=normal", ["pixel_value: unknown; did you mean pixel_values?"]),
    (of("ViTForImageClassification", {}), "", ["none given, and the default input_ids is unknown", "pixel_values"]),
    (VISION, "data.inputs.input_ids.value=3", ["input_ids.value: found 3, but the kind is tokens, which takes prefix"]),
    (
        VISION,
        "data.inputs.input_ids.prefix_length=17",
        ["prefix_length: found 17; it must be at most 16, the number of places"],
    ),
    (
        MASKED_VIT,
        "data.inputs.bool_masked_pos.count=5",
        ["count: found 5; it must be at most 4, the number of places in shape"],
    ),
    (W2V, "data.inputs.labels.low=4", ["labels.low: found 4; it must be below high, which is 4"]),
    (EFFICIENT, "model.config.num_hidden_layers=3", ["found 3, which changes nothing: EfficientNetConfig sets 64"]),
    (of("DeepseekV2ForCausalLM", {}), "model.config.head_dim=3", ["changes nothing: DeepseekV2Config sets 64"]),
    (QWEN, "model.config.head_dm=8", ["model.config.head_dm: unknown; did you mean head_dim? Qwen3MoeForCausalLM"]),
    (QWEN, "model.config.norm=true", ["model.config.norm: unknown"]),  # a module of the model, not a key
    (VISION, "model.config.hidden_size=3", ["model.config.hidden_size: unknown"]),  # the configurations inside have it
    (PUBLIC, "model.config.hiden_size=16", ["model.config.hiden_size: unknown; did you mean hidden_size?"]),
]


@pytest.mark.parametrize(("groups", "override", "words"), REFUSED, ids=lambda one: one if isinstance(one, str) else "")
def test_what_a_model_does_not_take_is_refused_in_one_line(recipe, groups, override, words):
    with pytest.raises(RecipeError) as refused:
        captured_model(recipe(groups, *[override] * bool(override)), 2)
    assert "\n" not in str(refused.value)
    for word in words:
        assert word in str(refused.value)


def test_a_transformers_that_cannot_be_imported_is_named_in_one_line(recipe, monkeypatch):
    loaded = recipe(DOCUMENTED["T5ForConditionalGeneration"])
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(InputError, match=r"^transformers cannot be imported: import of .* halted.*; `make setup`"):
        architecture(loaded)


def test_other_names_generation_keys_and_implementations_reach_the_model(recipe):
    sizes = {"hidden_size": 32, **without(T5, "d_model"), "num_beams": 4, "max_length": 40}
    model = build_function(recipe(of("T5ForConditionalGeneration", sizes)))()
    assert (model.config.d_model, model.config.num_beams, model.config.decoder_start_token_id) == (32, 4, 0)
    assert model.config.use_cache is False
    untied = build_function(recipe(of("T5ForConditionalGeneration", {**T5, "tie_word_embeddings": False})))()
    assert untied.config.scale_decoder_outputs is False, "what transformers makes of it"
    for wanted in ("eager", "sdpa"):
        model = build_function(recipe(of("LlamaForCausalLM", {**LLAMA, "attn_implementation": wanted})))()
        assert model.config._attn_implementation == wanted
    chosen = {"experts_implementation": "batched_mm", "attn_implementation": "eager"}
    model = build_function(recipe(of("MixtralForCausalLM", {**MIXTRAL, **chosen})))()
    assert (model.config._experts_implementation, model.config._attn_implementation) == ("batched_mm", "eager")


def test_keys_that_only_the_code_of_the_model_reads_reach_it(recipe):
    """The class of this configuration lacks head_dim, and its models read ``getattr(config, "head_dim", …)``."""
    groups = {**QWEN, "model": {**QWEN["model"], "config": {**QWEN["model"]["config"], "head_dim": 24}}}
    assert build_function(recipe(groups))().model.layers[0].self_attn.q_proj.weight.shape == (2 * 24, 16)


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_published_configuration_is_taken_as_it_is(recipe, name):
    """With the keys of its checkpoint, such as quantization_config, and those of its author's own code."""
    inputs = {"input_features": {"kind": "normal", "shape": [128, 3000]}, "labels": {"kind": "tokens"}}
    taken = PUBLISHED[name]["architecture"], PUBLISHED[name]["config"]
    architecture(recipe(of(*taken, inputs if name == "whisper-large" else None)))


def test_weights_are_float32_whatever_a_published_configuration_says(recipe):
    """transformers would make the weights of a configuration inside another in its type."""
    groups = DOCUMENTED["LlavaForConditionalGeneration"]
    model = build_function(recipe(groups, "model.config.dtype=bfloat16", f"{TEXT}torch_dtype=bfloat16"))()
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}


def test_configurations_inside_keep_no_past_either(recipe):
    model = architecture(recipe(DOCUMENTED["LlavaForConditionalGeneration"]))()
    assert model.config.text_config.use_cache is False


def test_kinds_of_inputs_are_those_of_the_engine():
    assert set(INPUT_KEYS) == set(KINDS)
