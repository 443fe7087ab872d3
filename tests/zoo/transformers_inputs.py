"""Models of transformers that read sound, video, time series or several inputs, and detectors."""

from tests.zoo.entry import TOKENS, VOCABULARY, Entry, integers, normal
from tests.zoo.transformers_classes import (
    IMAGE,
    LANGUAGE,
    SEQ2SEQ,
    SIZES,
    TINY,
    VISION,
    Contrastive,
    Detector,
    Illustrated,
    add,
    wrapped,
)

# fmt: off
ENTRIES: list[Entry] = []

WAVE = {"conv_dim": [16, 16], "conv_stride": [5, 4], "conv_kernel": [10, 8], "num_feat_extract_layers": 2,
        "num_conv_pos_embeddings": 16, "num_conv_pos_embedding_groups": 4, "mask_time_prob": 0.0,
        "num_adapter_layers": 1, "classifier_proj_size": 16, "vocab_size": 32, "num_labels": 4}
SOUND = normal(800)
for name in [
    "Wav2Vec2ForSequenceClassification",
    "HubertForSequenceClassification",
    "WavLMForSequenceClassification",
    "UniSpeechForSequenceClassification",
    "Data2VecAudioForSequenceClassification",
    "Wav2Vec2ConformerForSequenceClassification",
    "SEWForSequenceClassification",
    "SEWDForSequenceClassification",
]:
    ENTRIES += add("audio", name, {"input_values": SOUND, "labels": integers(high=4)},
         {**SIZES, **WAVE, "squeeze_factor": 2, "max_bucket_distance": 16, "num_buckets": 8})
ENTRIES += add("audio", "Wav2Vec2ForCTC", {"input_values": SOUND, "labels": integers(4, high=32)}, {**SIZES, **WAVE})
ENTRIES += add(
    "audio",
    "Wav2Vec2ForXVector",
    {"input_values": SOUND, "labels": integers(high=4)},
    {**SIZES, **WAVE, "tdnn_dim": [16, 16], "tdnn_kernel": [3, 1], "tdnn_dilation": [1, 1], "xvector_output_dim": 8},
)
ENTRIES += add(
    "audio",
    "Wav2Vec2BertForSequenceClassification",
    {"input_features": normal(20, 16), "labels": integers(high=4)},
    {**SIZES, "feature_projection_input_dim": 16, "num_labels": 4, "classifier_proj_size": 16, "mask_time_prob": 0.0},
)
ENTRIES += add("audio", "ASTForAudioClassification", {"input_values": normal(32, 16), "labels": integers(high=4)},
     {**SIZES, "max_length": 32, "num_mel_bins": 16, "patch_size": 8, "frequency_stride": 8, "time_stride": 8,
      "num_labels": 4})
WHISPER = {
    **SEQ2SEQ,
    "num_mel_bins": 16,
    "max_source_positions": 20,
    "max_target_positions": 32,
    "begin_suppress_tokens": [],
}
ENTRIES += add("audio", "WhisperForConditionalGeneration", {"input_features": normal(16, 40), "labels": TOKENS},
    WHISPER)
ENTRIES += add("audio", "WhisperForAudioClassification", {"input_features": normal(16, 40),
    "labels": integers(high=4)},
     {**WHISPER, "classifier_proj_size": 16, "num_labels": 4})
ENTRIES += add("audio", "Speech2TextForConditionalGeneration", {"input_features": normal(40, 16), "labels": TOKENS},
     {**SEQ2SEQ, "input_feat_per_channel": 16, "num_conv_layers": 2, "conv_channels": 32, "conv_kernel_sizes": [3, 3],
      "max_source_positions": 40, "max_target_positions": 32})
ENTRIES += add(
    "audio",
    "SpeechT5ForSpeechToText",
    {"input_values": SOUND, "labels": TOKENS},
    {**TINY, **WAVE, **SEQ2SEQ, "vocab_size": VOCABULARY, "max_text_positions": 64, "max_speech_positions": 100},
)
ENTRIES += add("audio", "MoonshineForConditionalGeneration", {"input_values": normal(2000), "labels": TOKENS},
     {**TINY, "encoder_num_hidden_layers": 2, "decoder_num_hidden_layers": 2, "encoder_num_attention_heads": 4,
      "decoder_num_attention_heads": 4, "decoder_start_token_id": 1})

ENTRIES += add("video", "TimesformerForVideoClassification", {"pixel_values": normal(2, 3, 32, 32),
    "labels": integers(high=4)},
     {**VISION, "num_frames": 2})
ENTRIES += add("video", "VivitForVideoClassification", {"pixel_values": normal(2, 3, 32, 32),
    "labels": integers(high=4)},
     {**VISION, "num_frames": 2, "tubelet_size": [2, 8, 8]})
ENTRIES += add("video", "VideoMAEForVideoClassification", {"pixel_values": normal(4, 3, 32, 32),
    "labels": integers(high=4)},
     {**VISION, "num_frames": 4, "tubelet_size": 2})
ENTRIES += add("video", "VJEPA2ForVideoClassification", {"pixel_values_videos": normal(4, 3, 32, 32),
    "labels": integers(high=4)},
     {**VISION, "crop_size": 32, "frames_per_clip": 4, "pred_hidden_size": 32, "pred_num_attention_heads": 4,
      "pred_num_hidden_layers": 1, "num_pooler_layers": 1, "mlp_ratio": 2})

SERIES = {"context_length": 16, "prediction_length": 4, "d_model": 16, "num_input_channels": 3}
ENTRIES += add(
    "time series",
    "PatchTSTForPrediction",
    {"past_values": normal(16, 3), "future_values": normal(4, 3)},
    {**SERIES, "patch_length": 4, "patch_stride": 4, "num_hidden_layers": 2, "num_attention_heads": 2, "ffn_dim": 32},
)
ENTRIES += add("time series", "PatchTSTForClassification", {"past_values": normal(16, 3),
    "target_values": integers(high=4)},
     {**SERIES, "patch_length": 4, "patch_stride": 4, "num_hidden_layers": 2, "num_attention_heads": 2, "ffn_dim": 32,
      "num_targets": 4})
ENTRIES += add("time series", "PatchTSMixerForPrediction", {"past_values": normal(16, 3),
    "future_values": normal(4, 3)},
     {**SERIES, "patch_length": 4, "patch_stride": 4, "num_layers": 2})
TIMES = {"prediction_length": 4, "context_length": 10, "d_model": 16, "num_time_features": 2, "lags_sequence": [1, 2],
         "encoder_layers": 1, "decoder_layers": 1, "encoder_ffn_dim": 16, "decoder_ffn_dim": 16, "input_size": 1}
MOMENTS = {"past_values": normal(12), "past_time_features": normal(12, 2), "past_observed_mask": integers(12),
           "future_values": normal(4), "future_time_features": normal(4, 2)}
for name in ["TimeSeriesTransformerForPrediction", "InformerForPrediction", "AutoformerForPrediction"]:
    ENTRIES += add("time series", name, MOMENTS, {**TIMES, "moving_average": 3, "label_length": 4})

TOWERS = {"text_config": TINY, "vision_config": VISION, "projection_dim": 16}
PAIR = {"input_ids": TOKENS, "pixel_values": IMAGE}
for name in [
    "CLIPModel",
    "SiglipModel",
    "ChineseCLIPModel",
    "AltCLIPModel",
    "MetaClip2Model",
    "CLIPSegModel",
    "BlipModel",
]:
    ENTRIES += wrapped("several inputs", name, Contrastive, PAIR, {**TOWERS, "image_text_hidden_size": 16})
ENTRIES += wrapped(
    "several inputs",
    "VisionTextDualEncoderModel",
    Contrastive,
    PAIR,
    {
        "text_config": {"model_type": "bert", **TINY},
        "vision_config": {"model_type": "vit", **VISION},
        "projection_dim": 16,
    },
)
ENTRIES += wrapped(
    "several inputs",
    "GroupViTModel",
    Contrastive,
    PAIR,
    {
        **TOWERS,
        "vision_config": {**VISION, "depths": [1, 1, 1], "num_group_tokens": [8, 4, 0], "num_output_groups": [8, 4,
        0]},
        "projection_intermediate_dim": 16,
    },
    draws=True,
)
ENTRIES += wrapped("several inputs", "OwlViTModel", Contrastive, PAIR, TOWERS)
ENTRIES += wrapped(
    "several inputs",
    "XCLIPModel",
    Contrastive,
    {"input_ids": TOKENS, "pixel_values": normal(2, 3, 32, 32)},
    {
        "text_config": TINY,
        "projection_dim": 32,
        "prompt_layers": 1,
        "prompt_num_attention_heads": 4,
        "mit_hidden_size": 32,
        "vision_config": {
            **VISION,
            "mit_hidden_size": 32,
            "mit_intermediate_size": 64,
            "mit_num_attention_heads": 4,
            "mit_num_hidden_layers": 1,
            "num_frames": 2,
        },
    },
)
ENTRIES += wrapped(
    "several inputs",
    "ClapModel",
    Contrastive,
    {"input_ids": TOKENS, "input_features": normal(1, 64, 64)},
    {
        "text_config": {**TINY, "projection_hidden_size": 16},
        "projection_dim": 16,
        "audio_config": {
            "spec_size": 64,
            "num_mel_bins": 64,
            "patch_size": 4,
            "window_size": 4,
            "hidden_size": 32,
            "patch_embeds_hidden_size": 16,
            "depths": [1, 1],
            "num_attention_heads": [2, 2],
            "num_classes": 4,
            "enable_fusion": False,
            "patch_stride": [4, 4],
        },
    },
)
ENTRIES += add(
    "several inputs",
    "BlipForConditionalGeneration",
    {**LANGUAGE, "pixel_values": IMAGE},
    {**TOWERS, "image_text_hidden_size": 16},
)
ENTRIES += add("several inputs", "GitForCausalLM", {**LANGUAGE, "pixel_values": IMAGE}, {**TINY,
    "vision_config": VISION})
ENTRIES += add(
    "several inputs",
    "VisionEncoderDecoderModel",
    {"pixel_values": IMAGE, "labels": TOKENS},
    {
        "encoder": {"model_type": "vit", **VISION},
        "decoder_start_token_id": 1,
        "pad_token_id": 0,
        "decoder": {"model_type": "gpt2", **TINY, "n_positions": 64, "add_cross_attention": True, "is_decoder": True},
    },
)
ENTRIES += add(
    "several inputs",
    "EncoderDecoderModel",
    LANGUAGE,
    {
        "encoder": {"model_type": "bert", **TINY},
        "decoder_start_token_id": 1,
        "pad_token_id": 0,
        "decoder": {"model_type": "bert", **TINY, "add_cross_attention": True, "is_decoder": True},
    },
)
ENTRIES += add(
    "several inputs",
    "SpeechEncoderDecoderModel",
    {"input_values": SOUND, "labels": TOKENS},
    {
        "encoder": {"model_type": "wav2vec2", **SIZES, **WAVE},
        "decoder_start_token_id": 1,
        "pad_token_id": 0,
        "decoder": {"model_type": "bert", **TINY, "add_cross_attention": True, "is_decoder": True},
    },
)
ENTRIES += add(
    "several inputs",
    "TrOCRForCausalLM",
    LANGUAGE,
    {
        **SEQ2SEQ,
        "use_cache": False,
        "cross_attention_hidden_size": 32,
        "is_decoder": True,
        "add_cross_attention": False,
    },
)
ENTRIES += add(
    "several inputs",
    "ViltForQuestionAnswering",
    {"input_ids": TOKENS, "pixel_values": IMAGE, "labels": normal(4)},
    {**TINY, **VISION, "vocab_size": VOCABULARY, "max_image_length": 16},
)
ENTRIES += add(
    "several inputs",
    "VisualBertForPreTraining",
    {
        "input_ids": TOKENS,
        "visual_embeds": normal(4, 16),
        "attention_mask": integers(16),
        "visual_attention_mask": integers(4),
        "labels": integers(20, high=VOCABULARY),
    },
    {**TINY, "visual_embedding_dim": 16},
)
ENTRIES += add(
    "several inputs",
    "LxmertForQuestionAnswering",
    {"input_ids": TOKENS, "visual_feats": normal(4, 16), "visual_pos": normal(4, 4), "labels": integers(high=4)},
    {**TINY, "l_layers": 1, "x_layers": 1, "r_layers": 1, "visual_feat_dim": 16, "num_qa_labels": 4},
)
ENTRIES += add(
    "several inputs",
    "LayoutLMv3ForTokenClassification",
    {"input_ids": TOKENS, "bbox": integers(16, 4, high=64), "pixel_values": IMAGE, "labels": integers(16)},
    {
        **TINY,
        "input_size": 32,
        "patch_size": 8,
        "max_2d_position_embeddings": 64,
        "coordinate_size": 6,
        "shape_size": 4,
    },
)
ENTRIES += add(
    "several inputs",
    "LiltForTokenClassification",
    {"input_ids": TOKENS, "bbox": integers(16, 4, high=1), "labels": integers(16)},
    {**TINY, "channel_shrink_ratio": 2, "max_2d_position_embeddings": 64, "hidden_size": 48},
)
ENTRIES += add(
    "several inputs",
    "BrosForTokenClassification",
    {"input_ids": TOKENS, "bbox": normal(16, 4), "labels": integers(16)},
    {**TINY, "dim_bbox": 4},
)
READER = {
    "text_config": {"model_type": "llama", **TINY},
    "vision_config": {"model_type": "siglip_vision_model", **VISION},
    "image_token_id": 3,
    "image_token_index": 3,
}
SEEN = {**LANGUAGE, "pixel_values": IMAGE}
ENTRIES += wrapped(
    "several inputs",
    "LlavaForConditionalGeneration",
    lambda model: Illustrated(model, 3, 16),
    SEEN,
    {**READER, "vision_config": {"model_type": "clip_vision_model", **VISION}, "vision_feature_layer": -1},
)
ENTRIES += wrapped(
    "several inputs",
    "VipLlavaForConditionalGeneration",
    lambda model: Illustrated(model, 3, 16),
    SEEN,
    {**READER, "vision_config": {"model_type": "clip_vision_model", **VISION}, "vision_feature_layers": [-2, -1]},
)
ENTRIES += wrapped(
    "several inputs",
    "PaliGemmaForConditionalGeneration",
    lambda model: Illustrated(model, 3, 16),
    SEEN,
    {**READER, "text_config": {"model_type": "gemma", **TINY}, "projection_dim": 32},
)
ENTRIES += wrapped(
    "several inputs",
    "Gemma3ForConditionalGeneration",
    lambda model: Illustrated(model, 3, 4),
    SEEN,
    {**READER, "text_config": {"model_type": "gemma3_text", **TINY}, "mm_tokens_per_image": 4},
)
ENTRIES += wrapped(
    "several inputs",
    "Idefics3ForConditionalGeneration",
    lambda model: Illustrated(model, 3, 4),
    {**LANGUAGE, "pixel_values": normal(1, 3, 32, 32)},
    {**READER, "vision_config": {**VISION, "model_type": "idefics3_vision"}, "scale_factor": 2},
)
ENTRIES += wrapped(
    "several inputs",
    "SmolVLMForConditionalGeneration",
    lambda model: Illustrated(model, 3, 4),
    {**LANGUAGE, "pixel_values": normal(1, 3, 32, 32)},
    {**READER, "vision_config": {**VISION, "model_type": "smolvlm_vision"}, "scale_factor": 2},
)
ENTRIES += wrapped(
    "several inputs",
    "InternVLForConditionalGeneration",
    lambda model: Illustrated(model, 3, 4),
    SEEN,
    {
        **READER,
        "text_config": {"model_type": "qwen2", **TINY},
        "image_seq_length": 4,
        "vision_config": {**VISION, "image_size": [32, 32], "patch_size": [8, 8], "model_type": "internvl_vision"},
    },
)
ENTRIES += wrapped(
    "several inputs",
    "AyaVisionForConditionalGeneration",
    lambda model: Illustrated(model, 3, 4),
    SEEN,
    {**READER, "text_config": {"model_type": "cohere2", **TINY}, "downsample_factor": 2, "vision_feature_layer": -1},
)

OBJECTS = {"pixel_values": normal(3, 64, 64), "class_labels": integers(2, high=4), "boxes": normal(2, 4)}
MATCHING = "boxes are matched by scipy, on values of the data"
RESNET = {
    "model_type": "resnet",
    "embedding_size": 8,
    "hidden_sizes": [8, 16, 24, 32],
    "depths": [1, 1, 1, 1],
    "out_features": ["stage4"],
}
DETR = {
    **SEQ2SEQ,
    "num_queries": 5,
    "num_labels": 4,
    "use_timm_backbone": False,
    "use_pretrained_backbone": False,
    "backbone": None,
    "backbone_config": RESNET,
    "num_feature_levels": 1,
}
for name in [
    "DetrForObjectDetection",
    "ConditionalDetrForObjectDetection",
    "TableTransformerForObjectDetection",
    "DeformableDetrForObjectDetection",
    "DabDetrForObjectDetection",
]:
    ENTRIES += wrapped("detection", name, Detector, OBJECTS, DETR, only_refused=MATCHING)
ENTRIES += wrapped(
    "detection",
    "YolosForObjectDetection",
    Detector,
    OBJECTS,
    {**VISION, "image_size": [64, 64], "num_detection_tokens": 5},
    only_refused=MATCHING,
)
