"""Entries of transformers' classes: name, changes to a tiny configuration, inputs."""

from collections.abc import Callable, Mapping
from copy import deepcopy
from typing import Any

import torch
from torch import nn

from auto3d.runtime.data import InputField
from tests.zoo.entry import SEQUENCE, TOKENS, VOCABULARY, Entry, integers, normal

TINY = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def build(name: str, config: Mapping[str, Any]) -> nn.Module:
    """The class called ``name`` with random weights, without dropout and without a cache."""
    import transformers

    model_class = getattr(transformers, name)
    made = model_class.config_class(**deepcopy(dict(config)))
    _without_dropout(made)
    return model_class(made)


def _without_dropout(config: Any) -> None:
    for key, value in vars(config).items():
        if ("drop" in key) and isinstance(value, float):
            setattr(config, key, 0.0)
        elif key == "use_cache":
            config.use_cache = False
        elif hasattr(value, "to_dict"):
            _without_dropout(value)


class Contrastive(nn.Module):
    """A model of two towers, asked for its loss."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, **inputs: torch.Tensor) -> torch.Tensor:
        return self.model(**inputs, return_loss=True).loss


class Illustrated(nn.Module):
    """A language model that reads images: ``count`` tokens called ``image_token`` come before the text."""

    def __init__(self, model: nn.Module, image_token: int, count: int) -> None:
        super().__init__()
        self.model, self.image_token, self.count = model, image_token, count

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor, **inputs: torch.Tensor) -> torch.Tensor:
        image = input_ids.new_full((input_ids.shape[0], self.count), self.image_token)
        return self.model(
            input_ids=torch.cat([image, input_ids.clamp(min=10)], dim=1),
            labels=torch.cat([image.new_full(image.shape, -100), labels], dim=1),
            **inputs,
        ).loss


class Detector(nn.Module):
    """An object detector with the same number of boxes in each image."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, pixel_values: torch.Tensor, class_labels: torch.Tensor, boxes: torch.Tensor) -> torch.Tensor:
        boxes = boxes.sigmoid() / 2 + 0.1
        labels = [{"class_labels": of, "boxes": box} for of, box in zip(class_labels, boxes, strict=True)]
        return self.model(pixel_values=pixel_values, labels=labels).loss


SIZES = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
}
EXPERTS = {
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "moe_num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_k": 2,
    "moe_topk": 2,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
    "n_group": 1,
    "topk_group": 1,
    "n_shared_experts": 1,
    "num_shared_experts": 1,
    "first_k_dense_replace": 1,
    "output_router_logits": True,
}
LATENT = {  # multi-head latent attention, with a value head that is narrower than the query head
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "head_dim": 8,
    "v_head_dim": 8,
    "num_key_value_heads": 4,
}
MAMBA = {
    "mamba_n_heads": 8,
    "mamba_d_head": 8,
    "mamba_d_state": 8,
    "mamba_n_groups": 1,
    "mamba_chunk_size": 8,
    "mamba_expand": 2,
    "mamba_d_conv": 4,
}
SEQ2SEQ = {
    "d_model": 32,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 64,
    "decoder_ffn_dim": 64,
    "decoder_start_token_id": 2,
    "max_position_embeddings": 64,
    "vocab_size": VOCABULARY,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "forced_eos_token_id": 2,
}
T5 = {
    "vocab_size": VOCABULARY,
    "d_model": 32,
    "d_ff": 64,
    "d_kv": 8,
    "num_layers": 2,
    "num_decoder_layers": 2,
    "num_heads": 4,
    "decoder_start_token_id": 0,
    "pad_token_id": 0,
}
IMAGE = normal(3, 32, 32)
VISION = {**SIZES, "image_size": 32, "patch_size": 8, "num_channels": 3, "num_labels": 4}
LANGUAGE = {"input_ids": TOKENS, "labels": TOKENS}
CLASSES = {"input_ids": TOKENS, "labels": integers(high=2)}
SPAN = {"input_ids": TOKENS, "start_positions": integers(high=SEQUENCE), "end_positions": integers(high=SEQUENCE)}
PICTURE = {"pixel_values": IMAGE, "labels": integers(high=4)}
MAP = {"pixel_values": IMAGE, "labels": integers(32, 32, high=4)}
DEPTH = {"pixel_values": IMAGE, "labels": normal(32, 32)}
ENTRIES: list[Entry] = []


def _add(family: str, name: str, inputs: Mapping[str, InputField], config: Mapping[str, Any], **facts: Any) -> None:
    ENTRIES.append(Entry(name=name, family=family, build=lambda: build(name, config), inputs=inputs, **facts))


def _wrapped(
    family: str,
    name: str,
    wrap: Callable[[nn.Module], nn.Module],
    inputs: Mapping[str, InputField],
    config: Mapping[str, Any],
    **facts: Any,
) -> None:
    ENTRIES.append(Entry(name=name, family=family, build=lambda: wrap(build(name, config)), inputs=inputs, **facts))


def _language(family: str, names: str, base: Mapping[str, Any] = TINY, **changes: Any) -> None:
    for name in names.split():
        _add(family, name, LANGUAGE, {**base, **changes})


_language(
    "decoder",
    """
    ApertusForCausalLM ArceeForCausalLM BertLMHeadModel BioGptForCausalLM BitNetForCausalLM BloomForCausalLM
    CohereForCausalLM Cohere2ForCausalLM CwmForCausalLM DiffLlamaForCausalLM Emu3ForCausalLM
    Ernie4_5ForCausalLM Exaone4ForCausalLM FlintForCausalLM GemmaForCausalLM Gemma2ForCausalLM Gemma3ForCausalLM
    GlmForCausalLM Glm4ForCausalLM GPT2LMHeadModel GPTBigCodeForCausalLM GPTNeoXForCausalLM
    GPTNeoXJapaneseForCausalLM GraniteForCausalLM GraniteSWAForCausalLM HeliumForCausalLM HunYuanDenseV1ForCausalLM
    HyperCLOVAXForCausalLM Jais2ForCausalLM LlamaForCausalLM MinistralForCausalLM Ministral3ForCausalLM
    MistralForCausalLM ModernBertDecoderForCausalLM NanoChatForCausalLM
    NemotronForCausalLM OlmoForCausalLM Olmo2ForCausalLM Olmo3ForCausalLM PersimmonForCausalLM PhiForCausalLM
    Phi3ForCausalLM Qwen2ForCausalLM Qwen3ForCausalLM SeedOssForCausalLM SmolLM3ForCausalLM StableLmForCausalLM
    Starcoder2ForCausalLM VaultGemmaForCausalLM
    """,
)
_language("decoder", "CTRLLMHeadModel", TINY, n_embd=32, n_layer=2, n_head=4, dff=64, n_positions=64)
_language("decoder", "OpenAIGPTLMHeadModel", TINY, n_embd=32, n_layer=2, n_head=4, n_positions=64)
_language("decoder", "GPTJForCausalLM CodeGenForCausalLM", TINY, rotary_dim=4, n_positions=64)
_language("decoder", "FalconForCausalLM", {key: TINY[key] for key in TINY if key != "head_dim"})
_language(
    "decoder",
    "GPTNeoForCausalLM",
    TINY,
    attention_types=[[["global", "local"], 1]],
    num_layers=2,
    num_heads=4,
    window_size=4,
)
_language("decoder", "OPTForCausalLM", TINY, ffn_dim=64, word_embed_proj_dim=32)
_language("decoder", "MptForCausalLM", TINY, d_model=32, n_layers=2, n_heads=4, max_seq_len=64, expansion_ratio=2)
_language("decoder", "XGLMForCausalLM", TINY, d_model=32, num_layers=2, attention_heads=4, ffn_dim=64)
UNBOUNDED = {key: TINY[key] for key in TINY if key != "max_position_embeddings"}
_language("decoder", "XLNetLMHeadModel", UNBOUNDED, d_model=32, n_layer=2, n_head=4, d_head=8, d_inner=64)
_language("decoder", "CpmAntForCausalLM", TINY, dim_head=8, dim_ff=64, prompt_types=4, prompt_length=4, segment_types=4)
_language("decoder", "MoshiForCausalLM", TINY, ffn_dim=64, audio_vocab_size=32)
_language("decoder", "ModernBertDecoderForCausalLM XLMRobertaForCausalLM", TINY, type_vocab_size=1)

MIXTURES = {**TINY, **EXPERTS}
_language(
    "mixture of experts",
    """
    AfmoeForCausalLM AriaTextForCausalLM Cohere2MoeForCausalLM Dots1ForCausalLM Ernie4_5_MoeForCausalLM
    ExaoneMoeForCausalLM FlexOlmoForCausalLM Glm4MoeForCausalLM GptOssForCausalLM GraniteMoeForCausalLM
    GraniteMoeSharedForCausalLM HunYuanMoEV1ForCausalLM JetMoeForCausalLM Llama4ForCausalLM MellumForCausalLM
    MiniMaxForCausalLM MiniMaxM2ForCausalLM MixtralForCausalLM OlmoeForCausalLM PhimoeForCausalLM
    Qwen2MoeForCausalLM Qwen3MoeForCausalLM SolarOpenForCausalLM
    """,
    MIXTURES,
)
_language(
    "mixture of experts", "Lfm2MoeForCausalLM", MIXTURES, layer_types=["conv", "full_attention"], num_dense_layers=1
)
_language("mixture of experts", "DbrxForCausalLM", TINY, d_model=32, n_heads=4, n_layers=2, max_seq_len=64,
          attn_config={"kv_n_heads": 2, "rope_theta": 1e4, "clip_qkv": 8},
          ffn_config={"ffn_hidden_size": 32, "moe_num_experts": 4, "moe_top_k": 2, "hidden_size": 32})  # fmt: skip
_language("latent attention", "DeepseekV2ForCausalLM DeepseekV3ForCausalLM", MIXTURES, **LATENT)
_language("latent attention", "MiniCPM3ForCausalLM Glm4MoeLiteForCausalLM", MIXTURES, **LATENT)
_language("latent attention", "LongcatFlashForCausalLM", MIXTURES, **LATENT, ffn_hidden_size=64, expert_ffn_hidden_size=32,
          zero_expert_num=2, num_layers=2)  # fmt: skip
_language("latent attention", "YoutuForCausalLM", TINY, **LATENT)

_language("state space or hybrid", "MambaForCausalLM FalconMambaForCausalLM", TINY, state_size=8)
_language(
    "state space or hybrid", "Mamba2ForCausalLM", TINY, state_size=8, num_heads=8, n_groups=1, chunk_size=8, expand=2
)
_language("state space or hybrid", "BambaForCausalLM", TINY, **MAMBA, attn_layer_indices=[1])
_language("state space or hybrid", "FalconH1ForCausalLM", TINY, **MAMBA, mamba_d_ssm=64)
_language("state space or hybrid", "JambaForCausalLM", MIXTURES, attn_layer_period=2, attn_layer_offset=1,
          expert_layer_period=2, expert_layer_offset=1, mamba_d_state=8, use_mamba_kernels=False)  # fmt: skip
_language("state space or hybrid", "Lfm2ForCausalLM", TINY, layer_types=["conv", "full_attention"])
_language("state space or hybrid", "GraniteMoeHybridForCausalLM", MIXTURES, **MAMBA, layer_types=["mamba", "attention"],
          shared_intermediate_size=32)  # fmt: skip
_language(
    "state space or hybrid", "RecurrentGemmaForCausalLM", TINY, lru_width=32, block_types=["recurrent", "attention"]
)
_language("state space or hybrid", "RwkvForCausalLM", TINY, attention_hidden_size=32, context_length=64)
_language("state space or hybrid", "Qwen3NextForCausalLM", MIXTURES, layer_types=["linear_attention", "full_attention"],
          linear_num_value_heads=4, linear_num_key_heads=2, linear_key_head_dim=8, linear_value_head_dim=8)  # fmt: skip
_language("state space or hybrid", "xLSTMForCausalLM", TINY, num_blocks=2, num_heads=4, chunk_size=8, mode="train")
_language("state space or hybrid", "ZambaForCausalLM", TINY, layers_block_type=["mamba", "hybrid"] * 2, num_hidden_layers=4, mamba_d_state=8,
          n_mamba_heads=2, attention_head_dim=16, attention_hidden_size=64)  # fmt: skip
_language("state space or hybrid", "NemotronHForCausalLM", TINY, layers_block_type=["mamba", "attention", "mlp"],
          mamba_num_heads=8, mamba_head_dim=8, ssm_state_size=8, n_groups=1, chunk_size=8)  # fmt: skip
_language("state space or hybrid", "OlmoHybridForCausalLM", TINY, layer_types=["linear_attention", "full_attention"])

_language(
    "encoder",
    """
    AlbertForMaskedLM BertForMaskedLM CamembertForMaskedLM ConvBertForMaskedLM DebertaForMaskedLM
    DebertaV2ForMaskedLM ElectraForMaskedLM ErnieForMaskedLM EsmForMaskedLM
    EuroBertForMaskedLM FNetForMaskedLM GteForMaskedLM IBertForMaskedLM LayoutLMForMaskedLM
    MegatronBertForMaskedLM ModernBertForMaskedLM MPNetForMaskedLM NomicBertForMaskedLM RemBertForMaskedLM
    RobertaForMaskedLM RobertaPreLayerNormForMaskedLM RoCBertForMaskedLM RoFormerForMaskedLM SqueezeBertForMaskedLM
    XLMRobertaForMaskedLM XLMRobertaXLForMaskedLM
    """,
    TINY,
    embedding_size=32,
)
_language("encoder", "DistilBertForMaskedLM", TINY, dim=32, hidden_dim=64, n_layers=2, n_heads=4)
_language("encoder", "FlaubertWithLMHeadModel XLMWithLMHeadModel", TINY, emb_dim=32, n_layers=2, n_heads=4)
_language("encoder", "MobileBertForMaskedLM", TINY, embedding_size=32, intra_bottleneck_size=32, true_hidden_size=32,
          num_feedforward_networks=1, hidden_size=32)  # fmt: skip
_language("encoder", "XmodForMaskedLM", TINY, languages=["en"], default_language="en")
_language("encoder", "FunnelForMaskedLM", {"vocab_size": VOCABULARY}, block_sizes=[1, 1], d_model=32, n_head=4, d_head=8,
          d_inner=64)  # fmt: skip
_language("encoder", "PerceiverForMaskedLM", TINY, num_latents=8, d_latents=32, d_model=32, num_blocks=1,
          num_self_attends_per_block=2, num_self_attention_heads=4, num_cross_attention_heads=4, qk_channels=32,
          v_channels=32, max_position_embeddings=SEQUENCE)  # fmt: skip
_language("long attention", "BigBirdForMaskedLM", TINY, attention_type="original_full")
_language("long attention", "LongformerForMaskedLM", TINY, attention_window=8)
_language("long attention", "NystromformerForMaskedLM", TINY, num_landmarks=4, segment_means_seq_len=16)
_language("long attention", "YosoForMaskedLM", TINY, use_expectation=True)
_language("long attention", "ReformerModelWithLMHead", TINY, attn_layers=["local", "lsh"], attention_head_size=8,
          axial_pos_shape=[4, 4], axial_pos_embds_dim=[16, 16], lsh_attn_chunk_length=4, local_attn_chunk_length=4,
          num_buckets=4, feed_forward_size=64, is_decoder=True)  # fmt: skip
for name in ["BertForSequenceClassification", "LlamaForSequenceClassification", "CanineForSequenceClassification", "DistilBertForSequenceClassification", "GPT2ForSequenceClassification"]:
    _add("encoder", name, CLASSES, {**TINY, "num_hash_buckets": 64, "dim": 32, "n_heads": 4, "hidden_dim": 64,
                                    "downsampling_rate": 2, "upsampling_kernel_size": 2, "local_transformer_stride": 8,
                                    "pad_token_id": None if name[0] in "LG" else 0})  # fmt: skip
for name in ["BertForQuestionAnswering", "SplinterForQuestionAnswering", "LiltForQuestionAnswering"]:
    _add("encoder", name, SPAN, {**TINY, "channel_shrink_ratio": 2})
_add(
    "encoder",
    "BertForMultipleChoice",
    {"input_ids": integers(3, 16, high=VOCABULARY), "labels": integers(high=3)},
    TINY,
)
_add("encoder", "ElectraForPreTraining", {"input_ids": TOKENS, "labels": integers(16)}, TINY)
_add("encoder", "EsmForTokenClassification", {"input_ids": TOKENS, "labels": integers(16)}, TINY)
_add("encoder", "BertForPreTraining", {**LANGUAGE, "next_sentence_label": integers()}, TINY)

_language(
    "encoder-decoder",
    """
    BartForConditionalGeneration BlenderbotForConditionalGeneration BlenderbotSmallForConditionalGeneration
    M2M100ForConditionalGeneration MarianMTModel MBartForConditionalGeneration MvpForConditionalGeneration
    PegasusForConditionalGeneration PLBartForConditionalGeneration
    BigBirdPegasusForConditionalGeneration
    """,
    SEQ2SEQ,
    attention_type="original_full",
)
_language("encoder-decoder", "PegasusXForConditionalGeneration", SEQ2SEQ, block_size=4, num_global_tokens=2)
_language("encoder-decoder", "LEDForConditionalGeneration", SEQ2SEQ, attention_window=[4, 4],
          max_encoder_position_embeddings=64, max_decoder_position_embeddings=64)  # fmt: skip
_language("encoder-decoder", "FSMTForConditionalGeneration", SEQ2SEQ, src_vocab_size=VOCABULARY,
          tgt_vocab_size=VOCABULARY, langs=["en", "de"])  # fmt: skip
_language("encoder-decoder", "ProphetNetForConditionalGeneration", SEQ2SEQ, hidden_size=32, num_encoder_layers=2,
          num_decoder_layers=2, num_encoder_attention_heads=4, num_decoder_attention_heads=4)  # fmt: skip
_language("encoder-decoder", "NllbMoeForConditionalGeneration", SEQ2SEQ, num_experts=4, expert_capacity=64,
          encoder_sparse_step=2, decoder_sparse_step=2)  # fmt: skip
_language("encoder-decoder", "T5ForConditionalGeneration MT5ForConditionalGeneration UMT5ForConditionalGeneration", T5)
_language("encoder-decoder", "LongT5ForConditionalGeneration", T5, encoder_attention_type="local", local_radius=3)
_language("encoder-decoder", "SwitchTransformersForConditionalGeneration", T5, num_experts=4, num_sparse_encoder_layers=1,
          num_sparse_decoder_layers=1, expert_capacity=64)  # fmt: skip
_language("encoder-decoder", "T5GemmaForConditionalGeneration", {"vocab_size": VOCABULARY}, encoder=TINY, decoder=TINY,
          is_encoder_decoder=True)  # fmt: skip

for name in ["ViTForImageClassification", "DeiTForImageClassification", "BeitForImageClassification", "Data2VecVisionForImageClassification", "Dinov2ForImageClassification", "Dinov2WithRegistersForImageClassification", "IJepaForImageClassification", "ViTMSNForImageClassification", "CLIPForImageClassification", "SiglipForImageClassification"]:
    _add("vision", name, PICTURE, {**VISION, **({"vision_config": VISION} if name[0] in "CS" else {})})
_add("vision", "SwinForImageClassification", PICTURE,
     {**VISION, "embed_dim": 8, "depths": [2, 2], "num_heads": [2, 2], "window_size": 4, "patch_size": 2})  # fmt: skip
_add("vision", "Swinv2ForImageClassification", PICTURE,
     {**VISION, "embed_dim": 8, "depths": [2, 2], "num_heads": [2, 2], "window_size": 4, "patch_size": 2})  # fmt: skip
_add("vision", "ConvNextForImageClassification", PICTURE,
     {"hidden_sizes": [8, 16], "depths": [2, 2], "num_stages": 2, "num_labels": 4, "patch_size": 2})  # fmt: skip
_add("vision", "ConvNextV2ForImageClassification", PICTURE,
     {"hidden_sizes": [8, 16], "depths": [2, 2], "num_stages": 2, "num_labels": 4, "patch_size": 2})  # fmt: skip
_add("vision", "ResNetForImageClassification", PICTURE,
     {"embedding_size": 8, "hidden_sizes": [16, 32], "depths": [2, 2], "num_labels": 4})  # fmt: skip
_add("vision", "RegNetForImageClassification", PICTURE,
     {"embedding_size": 8, "hidden_sizes": [16, 32], "depths": [2, 2], "groups_width": 8, "num_labels": 4})  # fmt: skip
_add("vision", "BitForImageClassification", PICTURE,
     {"embedding_size": 8, "hidden_sizes": [16, 32], "depths": [2, 2], "num_groups": 4, "num_labels": 4})  # fmt: skip
_add("vision", "CvtForImageClassification", PICTURE,
     {"embed_dim": [8, 16, 32], "num_heads": [1, 2, 4], "depth": [1, 1, 1], "num_labels": 4})  # fmt: skip
_add("vision", "EfficientNetForImageClassification", PICTURE,
     {"image_size": 32, "width_coefficient": 0.25, "depth_coefficient": 0.3, "hidden_dim": 40, "num_labels": 4,
      "kernel_sizes": [3, 3], "in_channels": [8, 16], "out_channels": [16, 24], "depthwise_padding": [], "strides": [1, 2],
      "num_block_repeats": [1, 2], "expand_ratios": [1, 4]})  # fmt: skip
_add("vision", "FocalNetForImageClassification", PICTURE,
     {**VISION, "embed_dim": 8, "depths": [2, 2], "hidden_sizes": [8, 16], "focal_levels": [1, 1], "focal_windows": [3, 3],
      "patch_size": 2})  # fmt: skip
_add("vision", "HGNetV2ForImageClassification", PICTURE, {"num_labels": 4})
_add("vision", "HieraForImageClassification", PICTURE,
     {**VISION, "image_size": [32, 32], "embed_dim": 8, "depths": [1, 1], "num_heads": [1, 2], "patch_kernel": [7, 7],
      "patch_stride": [4, 4], "patch_padding": [3, 3], "query_stride": [2, 2], "num_query_pool": 1,
      "masked_unit_size": [4, 4], "masked_unit_attention": [True, False], "embed_dim_multiplier": 2.0})  # fmt: skip
_add("vision", "LevitForImageClassification", {"pixel_values": normal(3, 64, 64), "labels": integers(high=4)},
     {"image_size": 64, "hidden_sizes": [16, 24, 32], "num_attention_heads": [2, 2, 2], "depths": [1, 1, 1],
      "key_dim": [4, 4, 4], "num_labels": 4})  # fmt: skip
_add("vision", "MobileNetV1ForImageClassification", PICTURE, {"depth_multiplier": 0.25, "num_labels": 4})
_add("vision", "MobileNetV2ForImageClassification", PICTURE, {"depth_multiplier": 0.25, "num_labels": 4})
_add("vision", "MobileViTForImageClassification", PICTURE,
     {"image_size": 32, "hidden_sizes": [16, 24, 32], "neck_hidden_sizes": [4, 8, 8, 16, 16, 16, 32],
      "num_attention_heads": 2, "num_labels": 4})  # fmt: skip
_add(
    "vision",
    "MobileViTV2ForImageClassification",
    PICTURE,
    {"image_size": 32, "width_multiplier": 0.25, "num_labels": 4},
)
_add("vision", "PoolFormerForImageClassification", PICTURE,
     {"hidden_sizes": [8, 16, 24, 32], "depths": [1, 1, 1, 1], "num_labels": 4})  # fmt: skip
_add("vision", "PvtForImageClassification", {"pixel_values": normal(3, 64, 64), "labels": integers(high=4)},
     {"image_size": 64, "hidden_sizes": [8, 16, 24, 32], "depths": [1, 1, 1, 1], "num_attention_heads": [1, 2, 2, 4],
      "num_labels": 4})  # fmt: skip
_add("vision", "PvtV2ForImageClassification", PICTURE,
     {"image_size": 32, "hidden_sizes": [8, 16, 24, 32], "depths": [1, 1, 1, 1], "num_attention_heads": [1, 2, 2, 4],
      "num_labels": 4})  # fmt: skip
_add(
    "vision",
    "SegformerForImageClassification",
    PICTURE,
    {"hidden_sizes": [8, 16, 24, 32], "depths": [1, 1, 1, 1], "num_attention_heads": [1, 2, 2, 4], "num_labels": 4},
)
_add("vision", "SwiftFormerForImageClassification", PICTURE,
     {"image_size": 32, "depths": [1, 1, 1, 1], "embed_dims": [8, 16, 24, 32], "num_labels": 4})  # fmt: skip
_add("vision", "TextNetForImageClassification", PICTURE, {"num_labels": 4, "hidden_sizes": [8, 8, 16, 16, 32]})
_add("vision", "DinatForImageClassification", PICTURE, {**VISION, "num_labels": 4})
_add("vision", "ImageGPTForImageClassification", {"input_ids": TOKENS, "labels": integers(high=4)},
     {"vocab_size": VOCABULARY, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64, "num_labels": 4})  # fmt: skip
_add("vision", "ViTForMaskedImageModeling", {"pixel_values": IMAGE, "bool_masked_pos": integers(16)},
     {**VISION, "encoder_stride": 8})  # fmt: skip
_add("vision", "ViTMAEForPreTraining", {"pixel_values": IMAGE, "noise": normal(16)},
     {**VISION, "decoder_hidden_size": 32, "decoder_num_hidden_layers": 1, "decoder_num_attention_heads": 4,
      "decoder_intermediate_size": 64})  # fmt: skip
_add("vision", "PerceiverForImageClassificationLearned", {"inputs": IMAGE, "labels": integers(high=4)},
     {"num_latents": 8, "d_latents": 32, "num_blocks": 1, "num_self_attends_per_block": 2, "num_self_attention_heads": 4,
      "num_cross_attention_heads": 1, "image_size": 32, "num_labels": 4})  # fmt: skip

_add("segmentation, depth", "SegformerForSemanticSegmentation", MAP,
     {"hidden_sizes": [8, 16, 24, 32], "depths": [1, 1, 1, 1], "num_attention_heads": [1, 2, 2, 4],
      "decoder_hidden_size": 16, "num_labels": 4})  # fmt: skip
_add("segmentation, depth", "BeitForSemanticSegmentation", MAP,
     {**VISION, "num_hidden_layers": 4, "out_indices": [1, 2, 3, 4], "semantic_loss_ignore_index": 255,
      "use_auxiliary_head": True, "auxiliary_channels": 16, "pool_scales": [1, 2]})  # fmt: skip
_add("segmentation, depth", "MobileNetV2ForSemanticSegmentation", MAP, {"depth_multiplier": 0.25, "num_labels": 4})
_add("segmentation, depth", "MobileViTForSemanticSegmentation", MAP,
     {"image_size": 32, "hidden_sizes": [16, 24, 32], "neck_hidden_sizes": [4, 8, 8, 16, 16, 16, 32],
      "num_attention_heads": 2, "num_labels": 4, "aspp_out_channels": 16})  # fmt: skip
_add("segmentation, depth", "DPTForSemanticSegmentation", MAP,
     {**VISION, "num_hidden_layers": 4, "backbone_out_indices": [0, 1, 2, 3], "neck_hidden_sizes": [8, 8, 16, 16],
      "fusion_hidden_size": 16, "is_hybrid": False})  # fmt: skip
_add("segmentation, depth", "GLPNForDepthEstimation", DEPTH,
     {"hidden_sizes": [8, 16, 24, 32], "depths": [1, 1, 1, 1], "num_attention_heads": [1, 2, 2, 4],
      "decoder_hidden_size": 16})  # fmt: skip
_add("segmentation, depth", "UperNetForSemanticSegmentation", MAP,
     {"backbone_config": {"model_type": "convnext", "hidden_sizes": [8, 8, 16, 16], "depths": [1, 1, 1, 1],
                          "out_features": ["stage1", "stage2", "stage3", "stage4"]},
      "hidden_size": 16, "num_labels": 4, "auxiliary_in_channels": 16, "auxiliary_channels": 16})  # fmt: skip
_add(
    "segmentation, depth",
    "CLIPSegForImageSegmentation",
    {"input_ids": TOKENS, "pixel_values": IMAGE, "labels": normal(32, 32)},
    {
        "text_config": TINY,
        "vision_config": {**VISION, "num_hidden_layers": 3},
        "extract_layers": [0, 1, 2],
        "projection_dim": 32,
        "reduce_dim": 16,
        "decoder_num_attention_heads": 4,
        "decoder_intermediate_size": 32,
    },
)
_add("segmentation, depth", "Swin2SRForImageSuperResolution",
     {"pixel_values": normal(3, 16, 16), "labels": normal(3, 32, 32)},
     {"image_size": 16, "embed_dim": 16, "depths": [1, 1], "num_heads": [2, 2], "window_size": 4})  # fmt: skip

WAVE = {"conv_dim": [16, 16], "conv_stride": [5, 4], "conv_kernel": [10, 8], "num_feat_extract_layers": 2,
        "num_conv_pos_embeddings": 16, "num_conv_pos_embedding_groups": 4, "mask_time_prob": 0.0,
        "num_adapter_layers": 1, "classifier_proj_size": 16, "vocab_size": 32, "num_labels": 4}  # fmt: skip
SOUND = normal(800)
for name in ["Wav2Vec2ForSequenceClassification", "HubertForSequenceClassification", "WavLMForSequenceClassification", "UniSpeechForSequenceClassification", "Data2VecAudioForSequenceClassification", "Wav2Vec2ConformerForSequenceClassification", "SEWForSequenceClassification", "SEWDForSequenceClassification"]:
    _add("audio", name, {"input_values": SOUND, "labels": integers(high=4)},
         {**SIZES, **WAVE, "squeeze_factor": 2, "max_bucket_distance": 16, "num_buckets": 8})  # fmt: skip
_add("audio", "Wav2Vec2ForCTC", {"input_values": SOUND, "labels": integers(4, high=32)}, {**SIZES, **WAVE})
_add(
    "audio",
    "Wav2Vec2ForXVector",
    {"input_values": SOUND, "labels": integers(high=4)},
    {**SIZES, **WAVE, "tdnn_dim": [16, 16], "tdnn_kernel": [3, 1], "tdnn_dilation": [1, 1], "xvector_output_dim": 8},
)
_add(
    "audio",
    "Wav2Vec2BertForSequenceClassification",
    {"input_features": normal(20, 16), "labels": integers(high=4)},
    {**SIZES, "feature_projection_input_dim": 16, "num_labels": 4, "classifier_proj_size": 16, "mask_time_prob": 0.0},
)
_add("audio", "ASTForAudioClassification", {"input_values": normal(32, 16), "labels": integers(high=4)},
     {**SIZES, "max_length": 32, "num_mel_bins": 16, "patch_size": 8, "frequency_stride": 8, "time_stride": 8,
      "num_labels": 4})  # fmt: skip
WHISPER = {
    **SEQ2SEQ,
    "num_mel_bins": 16,
    "max_source_positions": 20,
    "max_target_positions": 32,
    "begin_suppress_tokens": [],
}
_add("audio", "WhisperForConditionalGeneration", {"input_features": normal(16, 40), "labels": TOKENS}, WHISPER)
_add("audio", "WhisperForAudioClassification", {"input_features": normal(16, 40), "labels": integers(high=4)},
     {**WHISPER, "classifier_proj_size": 16, "num_labels": 4})  # fmt: skip
_add("audio", "Speech2TextForConditionalGeneration", {"input_features": normal(40, 16), "labels": TOKENS},
     {**SEQ2SEQ, "input_feat_per_channel": 16, "num_conv_layers": 2, "conv_channels": 32, "conv_kernel_sizes": [3, 3],
      "max_source_positions": 40, "max_target_positions": 32})  # fmt: skip
_add(
    "audio",
    "SpeechT5ForSpeechToText",
    {"input_values": SOUND, "labels": TOKENS},
    {**TINY, **WAVE, **SEQ2SEQ, "vocab_size": VOCABULARY, "max_text_positions": 64, "max_speech_positions": 100},
)
_add("audio", "MoonshineForConditionalGeneration", {"input_values": normal(2000), "labels": TOKENS},
     {**TINY, "encoder_num_hidden_layers": 2, "decoder_num_hidden_layers": 2, "encoder_num_attention_heads": 4,
      "decoder_num_attention_heads": 4, "decoder_start_token_id": 1})  # fmt: skip

_add("video", "TimesformerForVideoClassification", {"pixel_values": normal(2, 3, 32, 32), "labels": integers(high=4)},
     {**VISION, "num_frames": 2})  # fmt: skip
_add("video", "VivitForVideoClassification", {"pixel_values": normal(2, 3, 32, 32), "labels": integers(high=4)},
     {**VISION, "num_frames": 2, "tubelet_size": [2, 8, 8]})  # fmt: skip
_add("video", "VideoMAEForVideoClassification", {"pixel_values": normal(4, 3, 32, 32), "labels": integers(high=4)},
     {**VISION, "num_frames": 4, "tubelet_size": 2})  # fmt: skip
_add("video", "VJEPA2ForVideoClassification", {"pixel_values_videos": normal(4, 3, 32, 32), "labels": integers(high=4)},
     {**VISION, "crop_size": 32, "frames_per_clip": 4, "pred_hidden_size": 32, "pred_num_attention_heads": 4,
      "pred_num_hidden_layers": 1, "num_pooler_layers": 1, "mlp_ratio": 2})  # fmt: skip

SERIES = {"context_length": 16, "prediction_length": 4, "d_model": 16, "num_input_channels": 3}
_add(
    "time series",
    "PatchTSTForPrediction",
    {"past_values": normal(16, 3), "future_values": normal(4, 3)},
    {**SERIES, "patch_length": 4, "patch_stride": 4, "num_hidden_layers": 2, "num_attention_heads": 2, "ffn_dim": 32},
)
_add("time series", "PatchTSTForClassification", {"past_values": normal(16, 3), "target_values": integers(high=4)},
     {**SERIES, "patch_length": 4, "patch_stride": 4, "num_hidden_layers": 2, "num_attention_heads": 2, "ffn_dim": 32,
      "num_targets": 4})  # fmt: skip
_add("time series", "PatchTSMixerForPrediction", {"past_values": normal(16, 3), "future_values": normal(4, 3)},
     {**SERIES, "patch_length": 4, "patch_stride": 4, "num_layers": 2})  # fmt: skip
TIMES = {"prediction_length": 4, "context_length": 10, "d_model": 16, "num_time_features": 2, "lags_sequence": [1, 2],
         "encoder_layers": 1, "decoder_layers": 1, "encoder_ffn_dim": 16, "decoder_ffn_dim": 16, "input_size": 1}  # fmt: skip
MOMENTS = {"past_values": normal(12), "past_time_features": normal(12, 2), "past_observed_mask": integers(12),
           "future_values": normal(4), "future_time_features": normal(4, 2)}  # fmt: skip
for name in ["TimeSeriesTransformerForPrediction", "InformerForPrediction", "AutoformerForPrediction"]:
    _add("time series", name, MOMENTS, {**TIMES, "moving_average": 3, "label_length": 4})

TOWERS = {"text_config": TINY, "vision_config": VISION, "projection_dim": 16}
PAIR = {"input_ids": TOKENS, "pixel_values": IMAGE}
for name in ["CLIPModel", "SiglipModel", "ChineseCLIPModel", "AltCLIPModel", "MetaClip2Model", "CLIPSegModel", "BlipModel"]:
    _wrapped("several inputs", name, Contrastive, PAIR, {**TOWERS, "image_text_hidden_size": 16})
_wrapped("several inputs", "VisionTextDualEncoderModel", Contrastive, PAIR,
         {"text_config": {"model_type": "bert", **TINY}, "vision_config": {"model_type": "vit", **VISION},
          "projection_dim": 16})
_wrapped("several inputs", "GroupViTModel", Contrastive, PAIR,
         {**TOWERS, "vision_config": {**VISION, "depths": [1, 1, 1], "num_group_tokens": [8, 4, 0],
                                      "num_output_groups": [8, 4, 0]}, "projection_intermediate_dim": 16})
_wrapped("several inputs", "OwlViTModel", Contrastive, PAIR, TOWERS)
_wrapped("several inputs", "XCLIPModel", Contrastive, {"input_ids": TOKENS, "pixel_values": normal(2, 3, 32, 32)},
         {"text_config": TINY, "projection_dim": 32, "prompt_layers": 1, "prompt_num_attention_heads": 4, "mit_hidden_size": 32,
          "vision_config": {**VISION, "mit_hidden_size": 32, "mit_intermediate_size": 64, "mit_num_attention_heads": 4,
                            "mit_num_hidden_layers": 1, "num_frames": 2}})
_wrapped("several inputs", "ClapModel", Contrastive, {"input_ids": TOKENS, "input_features": normal(1, 64, 64)},
         {"text_config": {**TINY, "projection_hidden_size": 16}, "projection_dim": 16,
          "audio_config": {"spec_size": 64, "num_mel_bins": 64, "patch_size": 4, "window_size": 4, "hidden_size": 32,
                           "patch_embeds_hidden_size": 16, "depths": [1, 1], "num_attention_heads": [2, 2],
                           "num_classes": 4, "enable_fusion": False, "patch_stride": [4, 4]}})
_add("several inputs", "BlipForConditionalGeneration", {**LANGUAGE, "pixel_values": IMAGE},
     {**TOWERS, "image_text_hidden_size": 16})
_add("several inputs", "GitForCausalLM", {**LANGUAGE, "pixel_values": IMAGE}, {**TINY, "vision_config": VISION})
_add("several inputs", "Pix2StructForConditionalGeneration",
     {"flattened_patches": normal(8, 14), "labels": TOKENS},
     {"text_config": {**TINY, "num_layers": 2, "num_heads": 4, "d_kv": 8, "d_ff": 64, "decoder_start_token_id": 0},
      "vision_config": {**VISION, "patch_embed_hidden_size": 12, "d_ff": 64, "d_kv": 8, "seq_len": 8}})
_add("several inputs", "VisionEncoderDecoderModel", {"pixel_values": IMAGE, "labels": TOKENS},
     {"encoder": {"model_type": "vit", **VISION}, "decoder_start_token_id": 1, "pad_token_id": 0,
      "decoder": {"model_type": "gpt2", **TINY, "n_positions": 64, "add_cross_attention": True, "is_decoder": True}})
_add("several inputs", "EncoderDecoderModel", LANGUAGE,
     {"encoder": {"model_type": "bert", **TINY}, "decoder_start_token_id": 1, "pad_token_id": 0,
      "decoder": {"model_type": "bert", **TINY, "add_cross_attention": True, "is_decoder": True}})
_add("several inputs", "SpeechEncoderDecoderModel", {"input_values": SOUND, "labels": TOKENS},
     {"encoder": {"model_type": "wav2vec2", **SIZES, **WAVE}, "decoder_start_token_id": 1, "pad_token_id": 0,
      "decoder": {"model_type": "bert", **TINY, "add_cross_attention": True, "is_decoder": True}})
_add("several inputs", "TrOCRForCausalLM", LANGUAGE, {**SEQ2SEQ, "use_cache": False, "cross_attention_hidden_size": 32,
     "is_decoder": True, "add_cross_attention": False})
_add("several inputs", "ViltForQuestionAnswering", {"input_ids": TOKENS, "pixel_values": IMAGE, "labels": normal(4)},
     {**TINY, **VISION, "vocab_size": VOCABULARY, "max_image_length": 16})
_add("several inputs", "VisualBertForPreTraining",
     {"input_ids": TOKENS, "visual_embeds": normal(4, 16), "visual_attention_mask": normal(4),
      "labels": integers(20, high=VOCABULARY)},
     {**TINY, "visual_embedding_dim": 16})
_add("several inputs", "LxmertForQuestionAnswering",
     {"input_ids": TOKENS, "visual_feats": normal(4, 16), "visual_pos": normal(4, 4), "labels": integers(high=4)},
     {**TINY, "l_layers": 1, "x_layers": 1, "r_layers": 1, "visual_feat_dim": 16, "num_qa_labels": 4})
_add("several inputs", "LayoutLMv3ForTokenClassification",
     {"input_ids": TOKENS, "bbox": integers(16, 4, high=64), "pixel_values": IMAGE, "labels": integers(16)},
     {**TINY, "input_size": 32, "patch_size": 8, "max_2d_position_embeddings": 64, "coordinate_size": 6, "shape_size": 4})
_add("several inputs", "LiltForTokenClassification",
     {"input_ids": TOKENS, "bbox": integers(16, 4, high=64), "labels": integers(16)},
     {**TINY, "channel_shrink_ratio": 2, "max_2d_position_embeddings": 64, "hidden_size": 48})
_add("several inputs", "BrosForTokenClassification",
     {"input_ids": TOKENS, "bbox": normal(16, 4), "labels": integers(16)}, {**TINY, "dim_bbox": 4})
READER = {"text_config": {"model_type": "llama", **TINY}, "vision_config": {"model_type": "siglip_vision_model", **VISION},
          "image_token_id": 3, "image_token_index": 3}
SEEN = {**LANGUAGE, "pixel_values": IMAGE}
_wrapped("several inputs", "LlavaForConditionalGeneration", lambda model: Illustrated(model, 3, 16), SEEN,
         {**READER, "vision_config": {"model_type": "clip_vision_model", **VISION}, "vision_feature_layer": -1})
_wrapped("several inputs", "VipLlavaForConditionalGeneration", lambda model: Illustrated(model, 3, 16), SEEN,
         {**READER, "vision_config": {"model_type": "clip_vision_model", **VISION}, "vision_feature_layers": [-2, -1]})
_wrapped("several inputs", "PaliGemmaForConditionalGeneration", lambda model: Illustrated(model, 3, 16), SEEN,
         {**READER, "text_config": {"model_type": "gemma", **TINY}, "projection_dim": 32})
_wrapped("several inputs", "Gemma3ForConditionalGeneration", lambda model: Illustrated(model, 3, 4), SEEN,
         {**READER, "text_config": {"model_type": "gemma3_text", **TINY}, "mm_tokens_per_image": 4})
_wrapped("several inputs", "Idefics3ForConditionalGeneration", lambda model: Illustrated(model, 3, 4),
         {**LANGUAGE, "pixel_values": normal(1, 3, 32, 32)},
         {**READER, "vision_config": {**VISION, "model_type": "idefics3_vision"}, "scale_factor": 2})
_wrapped("several inputs", "SmolVLMForConditionalGeneration", lambda model: Illustrated(model, 3, 4),
         {**LANGUAGE, "pixel_values": normal(1, 3, 32, 32)},
         {**READER, "vision_config": {**VISION, "model_type": "smolvlm_vision"}, "scale_factor": 2})
_wrapped("several inputs", "InternVLForConditionalGeneration", lambda model: Illustrated(model, 3, 4), SEEN,
         {**READER, "text_config": {"model_type": "qwen2", **TINY}, "image_seq_length": 4,
          "vision_config": {**VISION, "image_size": [32, 32], "patch_size": [8, 8], "model_type": "internvl_vision"}})
_wrapped("several inputs", "AyaVisionForConditionalGeneration", lambda model: Illustrated(model, 3, 4), SEEN,
         {**READER, "text_config": {"model_type": "cohere2", **TINY}, "downsample_factor": 2, "vision_feature_layer": -1})
_wrapped("several inputs", "Qwen2AudioForConditionalGeneration", lambda model: Illustrated(model, 3, 5),
         {**LANGUAGE, "input_features": normal(16, 40), "feature_attention_mask": integers(40, high=1)},
         {"text_config": {"model_type": "qwen2", **TINY}, "audio_token_index": 3, "audio_token_id": 3,
          "audio_config": {"model_type": "qwen2_audio_encoder", "d_model": 32, "encoder_layers": 2, "num_mel_bins": 16,
                           "encoder_attention_heads": 4, "encoder_ffn_dim": 64, "max_source_positions": 20}})

OBJECTS = {"pixel_values": normal(3, 64, 64), "class_labels": integers(2, high=4), "boxes": normal(2, 4)}
MATCHING = "boxes are matched by scipy, on values of the data"
RESNET = {"model_type": "resnet", "embedding_size": 8, "hidden_sizes": [8, 16, 24, 32], "depths": [1, 1, 1, 1],
          "out_features": ["stage4"]}
DETR = {**SEQ2SEQ, "num_queries": 5, "num_labels": 4, "use_timm_backbone": False, "use_pretrained_backbone": False,
        "backbone": None, "backbone_config": RESNET, "num_feature_levels": 1}
for name in ["DetrForObjectDetection", "ConditionalDetrForObjectDetection", "TableTransformerForObjectDetection",
             "DeformableDetrForObjectDetection", "DabDetrForObjectDetection"]:
    _wrapped("detection", name, Detector, OBJECTS, DETR, only_refused=MATCHING)
_wrapped("detection", "YolosForObjectDetection", Detector, OBJECTS,
         {**VISION, "image_size": [64, 64], "num_detection_tokens": 5}, only_refused=MATCHING)
