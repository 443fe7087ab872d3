"""auto3d export: what from_pretrained loads computes what the trained weights compute."""

from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import nn

from auto3d.runtime.checkpoint.format import Checkpoint, StoredPart, StoredTensor, newest, to_json
from auto3d.runtime.checkpoint.reading import CheckpointReader
from launch.model.build import build_function
from launch.model.export import export
from launch.recipe.load import load

TOKENS = {"input_ids": torch.arange(1, 17).view(2, 8)}
SIZES = "{vocab_size: 257, hidden_size: 32, num_hidden_layers: 2, num_attention_heads: 2, intermediate_size: 64"
MODELS = {
    "BertForMaskedLM": (SIZES + "}", TOKENS),
    "LlamaForCausalLM": (SIZES + ", tie_word_embeddings: true}", TOKENS),
    "MixtralForCausalLM": (SIZES + ", num_key_value_heads: 1, num_local_experts: 2, num_experts_per_tok: 1}", TOKENS),
    "T5ForConditionalGeneration": (
        "{vocab_size: 257, d_model: 32, d_kv: 16, d_ff: 64, num_layers: 2, num_heads: 2, decoder_start_token_id: 0}",
        TOKENS | {"decoder_input_ids": TOKENS["input_ids"]},
    ),
    "ResNetForImageClassification": (
        "{embedding_size: 8, hidden_sizes: [16, 32], depths: [2, 2], layer_type: bottleneck}",
        {"pixel_values": torch.rand(2, 3, 32, 32)},
    ),
}


def by_hand(folder: Path, model: nn.Module) -> None:
    """A checkpoint of ``model``, each matrix in two ranges of its elements."""
    folder.mkdir()
    tensors, ranks = {}, [{}, {}]
    for name, tensor in {**dict(model.named_parameters()), **dict(model.named_buffers())}.items():
        flat, half = tensor.detach().flatten(), tensor.numel() // 2
        ranks[0][f"model.{name}"], ranks[1][f"model.{name}"] = flat[:half].clone(), flat[half:].clone()
        ranges = ((0, half), (half, tensor.numel()))
        parts = [StoredPart(file=f"rank-{rank}", flat=one) for rank, one in enumerate(ranges)]
        tensors[f"model.{name}"] = StoredTensor(shape=tuple(tensor.shape), parts=parts)
    for rank, content in enumerate(ranks):
        save_file(content, folder / f"rank-{rank}")
    files = {f"rank-{rank}": (folder / f"rank-{rank}").stat().st_size for rank in range(2)}
    checkpoint = Checkpoint(iteration=3, learnt={"seed": "1"}, numbers={}, files=files, tensors=tensors)
    (folder / "checkpoint.json").write_text(to_json(checkpoint))


def logits(model: nn.Module, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
    with torch.no_grad():
        return model.eval()(**inputs).logits


@pytest.mark.parametrize("architecture", MODELS)
def test_from_pretrained_computes_the_same(tmp_path, monkeypatch, architecture):
    config, inputs = MODELS[architecture]
    monkeypatch.chdir(tmp_path)
    images = "{inputs: {pixel_values: {kind: normal, shape: [3, 32, 32]}}}"
    data = "{sequence_length: 8}" if "input_ids" in inputs else images
    Path("own.yaml").write_text(f"model: {{architecture: {architecture}, config: {config}}}\ndata: {data}\n")
    recipe = load("own.yaml")
    torch.manual_seed(7)
    trained = build_function(recipe)()
    for tensor in {tensor.data_ptr(): tensor for tensor in trained.state_dict().values()}.values():
        if tensor.is_floating_point():
            tensor.mul_(1 + 0.1 * torch.rand_like(tensor))
    by_hand(tmp_path / "checkpoint", trained)
    said = export(recipe, tmp_path / "checkpoint", tmp_path / "out", largest_bytes=10_000)
    assert said == f"{tmp_path / 'out'}: {architecture} for from_pretrained, after iteration 3"
    assert len(list(Path("out").glob("*.safetensors"))) > 1
    loaded, report = getattr(transformers, architecture).from_pretrained("out", output_loading_info=True)
    assert not any(report.values()), report
    expected = logits(trained, inputs)
    assert (logits(loaded, inputs) - expected).abs().max() <= 1e-5 * expected.abs().max()
    with pytest.raises(ValueError, match="out: it exists; give the name of a new folder"):
        export(recipe, tmp_path / "checkpoint", tmp_path / "out")


GPT2 = "small.yaml", "model.config.vocab_size=257", "training.checkpoint_every=1"
SOUGHT = "plan.schedule=synthesized", "search.order_seconds=0.2"


def test_a_training_is_exported_and_goes_on_under_another_plan(folder, auto3d):
    auto3d("train", *GPT2, "plan.tp=2", "plan.pp=2", *SOUGHT)
    (checkpoints,) = folder.glob("runs/small/checkpoints/train-*")
    assert (
        "out: GPT2LMHeadModel for from_pretrained, after iteration 2" in auto3d("export", GPT2[0], "out", *GPT2[1:]).out
    )
    loaded = transformers.AutoModelForCausalLM.from_pretrained("out")
    with CheckpointReader(checkpoints / "iteration-00000002") as reader:
        trained = build_function(load(GPT2[0], GPT2[1:]))()
        trained.load_state_dict({n: reader.whole(f"model.{n}") for n, _ in trained.named_parameters()}, strict=False)
    assert loaded.config.use_cache
    expected = logits(trained, TOKENS)
    assert (logits(loaded, TOKENS) - expected).abs().max() <= 1e-5 * expected.abs().max()

    more = auto3d("train", *GPT2, "plan.dp=2", "plan.pp=1", "training.iterations=4")
    assert "continuing after iteration 2 of 4, by the checkpoint in runs/small/checkpoints/train-" in more.err
    assert "2 iterations under dp=2" in more.out
    assert newest(checkpoints) == 4
    back = auto3d("train", *GPT2, "plan.pp=2", *SOUGHT, "training.iterations=6")
    assert "continuing after iteration 4 of 6" in back.err
    assert "2 iterations under dp=1 tp=1 pp=2 micro-batch=2 synthesized" in back.out
    assert newest(checkpoints) == 6
    whole = auto3d("train", *GPT2, "plan.pp=2", "training.iterations=4", "--fresh", "--json").out
    parts = auto3d("train", *GPT2, "plan.pp=2", "training.iterations=4", code=0).err
    assert "nothing left to do" in parts
    assert whole
    first = auto3d("train", *GPT2, "plan.pp=1", "plan.dp=2", "training.learning_rate=0.1", "--json")
    assert "continuing" not in first.err, "it learns something else, so its checkpoints are others"
    file = next((checkpoints / "iteration-00000004").glob("rank-*"))
    file.write_bytes(file.read_bytes()[:-1])
    told = auto3d("train", *GPT2, "training.iterations=6", code=2).err
    assert "were written; remove" in told
    refused = auto3d("export", GPT2[0], "other", code=2).err
    assert "no checkpoint; give the overrides of the training, or --checkpoint FOLDER" in refused


ADAPTED = """
from transformers import GPT2Config, GPT2LMHeadModel
from peft import LoraConfig, get_peft_model

def make():
    sizes = dict(n_layer=2, n_head=2, n_embd=32, n_positions=32, vocab_size=256, use_cache=False)
    rates = dict(resid_pdrop=0, embd_pdrop=0, attn_pdrop=0)
    base = GPT2LMHeadModel(GPT2Config(**sizes, **rates, bos_token_id=0, eos_token_id=0))
    return get_peft_model(base, LoraConfig(r=4, target_modules=["c_attn"], fan_in_fan_out=True))
"""


def test_an_adapter_is_exported_for_peft(folder, auto3d):
    from peft import PeftModel

    (folder / "adapted.py").write_text(ADAPTED)
    (folder / "lora.yaml").write_text(
        "model: {factory: 'adapted:make'}\ndata: {sequence_length: 16}\n"
        "training: {global_batch: 8, iterations: 2, checkpoint_every: 1}\nplan: {dp: 2, pp: 2, micro_batch_size: 2}\n"
        "launch: {executor: local}\n"
    )
    auto3d("train", "lora.yaml")
    (checkpoint,) = folder.glob("runs/lora/checkpoints/*/iteration-00000002")
    assert "adapter: the adapter, for PeftModel, after iteration 2" in auto3d("export", "lora.yaml", "adapter").out
    assert sorted(file.name for file in Path("adapter").iterdir()) == [
        "adapter_config.json",
        "adapter_model.safetensors",
    ]
    recipe = load("lora.yaml")
    trained = build_function(recipe)()
    with CheckpointReader(checkpoint) as reader:
        stored = reader.checkpoint.tensors
        optimised = {name.split(".", 1)[1].rpartition(".")[0] for name in stored if name.startswith("optimizer.")}
        assert optimised == {name for name, p in trained.named_parameters() if p.requires_grad}
        trained.load_state_dict({n: reader.whole(f"model.{n}") for n, _ in trained.named_parameters()}, strict=False)
    base = build_function(recipe)().unload()
    base.load_state_dict(trained.base_model.model.state_dict(), strict=False)
    for name, parameter in base.named_parameters():
        parameter.data.copy_(trained.get_parameter(f"base_model.model.{name.replace('c_attn.', 'c_attn.base_layer.')}"))
    loaded = PeftModel.from_pretrained(base, "adapter")
    expected = logits(trained, TOKENS)
    assert (logits(loaded, TOKENS) - expected).abs().max() <= 1e-5 * expected.abs().max()
    assert any(
        "lora_B" in name and tensor.abs().max() > 0
        for name, tensor in load_file("adapter/adapter_model.safetensors").items()
    )
