"""Models of transformers that read and write text."""

from tests.zoo.entry import SEQUENCE, TOKENS, VOCABULARY, Entry, integers
from tests.zoo.transformers_classes import (
    CLASSES,
    EXPERTS,
    LANGUAGE,
    LATENT,
    MAMBA,
    SEQ2SEQ,
    SPAN,
    T5,
    TINY,
    add,
    language,
)

# fmt: off
ENTRIES: list[Entry] = []

ENTRIES += language(
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
ENTRIES += language("decoder", "CTRLLMHeadModel", TINY, n_embd=32, n_layer=2, n_head=4, dff=64, n_positions=64)
ENTRIES += language("decoder", "OpenAIGPTLMHeadModel", TINY, n_embd=32, n_layer=2, n_head=4, n_positions=64)
ENTRIES += language("decoder", "GPTJForCausalLM CodeGenForCausalLM", TINY, rotary_dim=4, n_positions=64)
ENTRIES += language("decoder", "FalconForCausalLM", {key: TINY[key] for key in TINY if key != "head_dim"})
ENTRIES += language(
    "decoder",
    "GPTNeoForCausalLM",
    TINY,
    attention_types=[[["global", "local"], 1]],
    num_layers=2,
    num_heads=4,
    window_size=4,
)
ENTRIES += language("decoder", "OPTForCausalLM", TINY, ffn_dim=64, word_embed_proj_dim=32)
ENTRIES += language("decoder", "MptForCausalLM", TINY, d_model=32, n_layers=2, n_heads=4, max_seq_len=64,
    expansion_ratio=2)
ENTRIES += language("decoder", "XGLMForCausalLM", TINY, d_model=32, num_layers=2, attention_heads=4, ffn_dim=64)
UNBOUNDED = {key: TINY[key] for key in TINY if key != "max_position_embeddings"}
ENTRIES += language("decoder", "XLNetLMHeadModel", UNBOUNDED, d_model=32, n_layer=2, n_head=4, d_head=8, d_inner=64)
ENTRIES += language("decoder", "CpmAntForCausalLM", TINY, dim_head=8, dim_ff=64, prompt_types=4, prompt_length=4,
    segment_types=4)
ENTRIES += language("decoder", "MoshiForCausalLM", TINY, ffn_dim=64, audio_vocab_size=32)
ENTRIES += language("decoder", "XLMRobertaForCausalLM", TINY, type_vocab_size=1)

MIXTURES = {**TINY, **EXPERTS}
ENTRIES += language(
    "mixture of experts",
    """
    AfmoeForCausalLM AriaTextForCausalLM Cohere2MoeForCausalLM Dots1ForCausalLM Ernie4_5_MoeForCausalLM
    ExaoneMoeForCausalLM FlexOlmoForCausalLM Glm4MoeForCausalLM GptOssForCausalLM GraniteMoeForCausalLM
    GraniteMoeSharedForCausalLM HunYuanMoEV1ForCausalLM JetMoeForCausalLM Llama4ForCausalLM MellumForCausalLM
    MiniMaxForCausalLM MiniMaxM2ForCausalLM MixtralForCausalLM OlmoeForCausalLM
    Qwen2MoeForCausalLM Qwen3MoeForCausalLM SolarOpenForCausalLM
    """,
    MIXTURES,
)
ENTRIES += add("mixture of experts", "PhimoeForCausalLM", LANGUAGE, MIXTURES, draws=True)
ENTRIES += language(
    "mixture of experts", "Lfm2MoeForCausalLM", MIXTURES, layer_types=["conv", "full_attention"], num_dense_layers=1
)
ENTRIES += language("mixture of experts", "DbrxForCausalLM", TINY, d_model=32, n_heads=4, n_layers=2, max_seq_len=64,
          attn_config={"kv_n_heads": 2, "rope_theta": 1e4, "clip_qkv": 8},
          ffn_config={"ffn_hidden_size": 32, "moe_num_experts": 4, "moe_top_k": 2, "hidden_size": 32})
ENTRIES += language("latent attention", "DeepseekV2ForCausalLM DeepseekV3ForCausalLM", MIXTURES, **LATENT)
ENTRIES += language("latent attention", "MiniCPM3ForCausalLM Glm4MoeLiteForCausalLM", MIXTURES, **LATENT)
ENTRIES += language("latent attention", "LongcatFlashForCausalLM", MIXTURES, **LATENT, ffn_hidden_size=64,
    expert_ffn_hidden_size=32,
          zero_expert_num=2, num_layers=2)
ENTRIES += language("latent attention", "YoutuForCausalLM", TINY, **LATENT)

ENTRIES += language("state space or hybrid", "MambaForCausalLM FalconMambaForCausalLM", TINY, state_size=8)
ENTRIES += language(
    "state space or hybrid", "Mamba2ForCausalLM", TINY, state_size=8, num_heads=8, n_groups=1, chunk_size=8, expand=2
)
ENTRIES += language("state space or hybrid", "BambaForCausalLM", TINY, **MAMBA, attn_layer_indices=[1])
ENTRIES += language("state space or hybrid", "FalconH1ForCausalLM", TINY, **MAMBA, mamba_d_ssm=64)
ENTRIES += language("state space or hybrid", "JambaForCausalLM", MIXTURES, attn_layer_period=2, attn_layer_offset=1,
          expert_layer_period=2, expert_layer_offset=1, mamba_d_state=8, use_mamba_kernels=False)
ENTRIES += language("state space or hybrid", "Lfm2ForCausalLM", TINY, layer_types=["conv", "full_attention"])
ENTRIES += language("state space or hybrid", "GraniteMoeHybridForCausalLM", MIXTURES, **MAMBA,
    layer_types=["mamba", "attention"],
          shared_intermediate_size=32)
ENTRIES += language(
    "state space or hybrid", "RecurrentGemmaForCausalLM", TINY, lru_width=32, block_types=["recurrent", "attention"]
)
ENTRIES += language("state space or hybrid", "RwkvForCausalLM", TINY, attention_hidden_size=32, context_length=64)
ENTRIES += language("state space or hybrid", "Qwen3NextForCausalLM", MIXTURES, layer_types=["linear_attention",
    "full_attention"],
          linear_num_value_heads=4, linear_num_key_heads=2, linear_key_head_dim=8, linear_value_head_dim=8)
ENTRIES += language("state space or hybrid", "xLSTMForCausalLM", TINY, num_blocks=2, num_heads=4, chunk_size=8,
    mode="train")
ENTRIES += language("state space or hybrid", "ZambaForCausalLM", TINY, layers_block_type=["mamba", "hybrid"] * 2,
    num_hidden_layers=4, mamba_d_state=8,
          n_mamba_heads=2, attention_head_dim=16, attention_hidden_size=64)
ENTRIES += language("state space or hybrid", "NemotronHForCausalLM", TINY, layers_block_type=["mamba", "attention",
    "mlp"],
          mamba_num_heads=8, mamba_head_dim=8, ssm_state_size=8, n_groups=1, chunk_size=8)
ENTRIES += language("state space or hybrid", "OlmoHybridForCausalLM", TINY, layer_types=["linear_attention",
    "full_attention"])

ENTRIES += language(
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
ENTRIES += language("encoder", "DistilBertForMaskedLM", TINY, dim=32, hidden_dim=64, n_layers=2, n_heads=4)
ENTRIES += language("encoder", "FlaubertWithLMHeadModel XLMWithLMHeadModel", TINY, emb_dim=32, n_layers=2, n_heads=4)
ENTRIES += language("encoder", "MobileBertForMaskedLM", TINY, embedding_size=32, intra_bottleneck_size=32,
    true_hidden_size=32,
          num_feedforward_networks=1, hidden_size=32)
ENTRIES += language("encoder", "XmodForMaskedLM", TINY, languages=["en"], default_language="en")
ENTRIES += language("encoder", "FunnelForMaskedLM", {"vocab_size": VOCABULARY}, block_sizes=[1, 1], d_model=32,
    n_head=4, d_head=8,
          d_inner=64)
ENTRIES += language("encoder", "PerceiverForMaskedLM", TINY, num_latents=8, d_latents=32, d_model=32, num_blocks=1,
          num_self_attends_per_block=2, num_self_attention_heads=4, num_cross_attention_heads=4, qk_channels=32,
          v_channels=32, max_position_embeddings=SEQUENCE)
ENTRIES += language("long attention", "BigBirdForMaskedLM", TINY, attention_type="original_full")
ENTRIES += language("long attention", "LongformerForMaskedLM", TINY, attention_window=8)
ENTRIES += language("long attention", "NystromformerForMaskedLM", TINY, num_landmarks=4, segment_means_seq_len=16)
ENTRIES += language("long attention", "YosoForMaskedLM", TINY, use_expectation=True)
ENTRIES += language("long attention", "ReformerModelWithLMHead", TINY, attn_layers=["local", "lsh"],
    attention_head_size=8,
          axial_pos_shape=[4, 4], axial_pos_embds_dim=[16, 16], lsh_attn_chunk_length=4, local_attn_chunk_length=4,
          num_buckets=4, feed_forward_size=64, is_decoder=True)
for name in [
    "BertForSequenceClassification",
    "LlamaForSequenceClassification",
    "CanineForSequenceClassification",
    "DistilBertForSequenceClassification",
    "GPT2ForSequenceClassification",
]:
    ENTRIES += add("encoder", name, CLASSES, {**TINY, "num_hash_buckets": 64, "dim": 32, "n_heads": 4,
                                    "hidden_dim": 64,
                                    "downsampling_rate": 2, "upsampling_kernel_size": 2,
                                    "local_transformer_stride": 8})
for name in ["BertForQuestionAnswering", "SplinterForQuestionAnswering", "LiltForQuestionAnswering"]:
    ENTRIES += add("encoder", name, SPAN, {**TINY, "channel_shrink_ratio": 2, "hidden_size": 48})
ENTRIES += add(
    "encoder",
    "BertForMultipleChoice",
    {"input_ids": integers(3, 16, high=VOCABULARY), "labels": integers(high=3)},
    TINY,
)
ENTRIES += add("encoder", "ElectraForPreTraining", {"input_ids": TOKENS, "labels": integers(16)}, TINY)
ENTRIES += add("encoder", "EsmForTokenClassification", {"input_ids": TOKENS, "labels": integers(16)}, TINY)
ENTRIES += add("encoder", "BertForPreTraining", {**LANGUAGE, "next_sentence_label": integers()}, TINY)

ENTRIES += language(
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
ENTRIES += language("encoder-decoder", "PegasusXForConditionalGeneration", SEQ2SEQ, block_size=4, num_global_tokens=2)
ENTRIES += language("encoder-decoder", "LEDForConditionalGeneration", SEQ2SEQ, attention_window=[4, 4],
          max_encoder_position_embeddings=64, max_decoder_position_embeddings=64)
ENTRIES += language("encoder-decoder", "FSMTForConditionalGeneration", SEQ2SEQ, src_vocab_size=VOCABULARY,
          tgt_vocab_size=VOCABULARY, langs=["en", "de"])
ENTRIES += language("encoder-decoder", "ProphetNetForConditionalGeneration",
          {key: value for key, value in SEQ2SEQ.items() if not key.endswith("coder_layers")}, hidden_size=32,
          num_encoder_layers=2, num_decoder_layers=2, num_encoder_attention_heads=4, num_decoder_attention_heads=4)
ENTRIES += language("encoder-decoder", "NllbMoeForConditionalGeneration", SEQ2SEQ, num_experts=4, expert_capacity=64,
          encoder_sparse_step=2, decoder_sparse_step=2)
ENTRIES += language("encoder-decoder",
    "T5ForConditionalGeneration MT5ForConditionalGeneration UMT5ForConditionalGeneration", T5)
ENTRIES += language("encoder-decoder", "LongT5ForConditionalGeneration", T5, encoder_attention_type="local",
    local_radius=3)
ENTRIES += language("encoder-decoder", "SwitchTransformersForConditionalGeneration", T5, num_experts=4,
    num_sparse_encoder_layers=1,
          num_sparse_decoder_layers=1, expert_capacity=64)
ENTRIES += language("encoder-decoder", "T5GemmaForConditionalGeneration", {"vocab_size": VOCABULARY}, encoder=TINY,
    decoder=TINY,
          is_encoder_decoder=True)
