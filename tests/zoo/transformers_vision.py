"""Models of transformers that read images."""

from tests.zoo.entry import TOKENS, VOCABULARY, Entry, integers, normal
from tests.zoo.transformers_classes import (
    DEPTH,
    IMAGE,
    MAP,
    PICTURE,
    TINY,
    VISION,
    Double,
    add,
    wrapped,
)

# fmt: off
ENTRIES: list[Entry] = []
# Batch statistics of a few numbers magnify rounding, so models that divide images by 32 get larger ones.
WIDE = {"pixel_values": normal(3, 96, 96), "labels": integers(high=4)}
WIDE_MAP = {"pixel_values": normal(3, 96, 96), "labels": integers(96, 96, high=4)}
SQUARE = {"image_size": 32, "num_channels": 3, "num_labels": 4}

for name in [
    "ViTForImageClassification",
    "DeiTForImageClassification",
    "BeitForImageClassification",
    "Data2VecVisionForImageClassification",
    "Dinov2ForImageClassification",
    "Dinov2WithRegistersForImageClassification",
    "IJepaForImageClassification",
    "ViTMSNForImageClassification",
    "CLIPForImageClassification",
    "SiglipForImageClassification",
]:
    ENTRIES += add("vision", name, PICTURE, {**VISION, **({"vision_config": VISION} if name[0] in "CS" else {})})
ENTRIES += add("vision", "SwinForImageClassification", PICTURE,
     {**SQUARE, "embed_dim": 8, "depths": [2, 2], "num_heads": [2, 2], "window_size": 4, "patch_size": 2})
ENTRIES += add("vision", "Swinv2ForImageClassification", PICTURE,
     {**SQUARE, "embed_dim": 8, "depths": [2, 2], "num_heads": [2, 2], "window_size": 4, "patch_size": 2})
ENTRIES += add("vision", "ConvNextForImageClassification", PICTURE,
     {"hidden_sizes": [8, 16], "depths": [2, 2], "num_stages": 2, "num_labels": 4, "patch_size": 2})
ENTRIES += add("vision", "ConvNextV2ForImageClassification", PICTURE,
     {"hidden_sizes": [8, 16], "depths": [2, 2], "num_stages": 2, "num_labels": 4, "patch_size": 2})
ENTRIES += add("vision", "ResNetForImageClassification", PICTURE,
     {"embedding_size": 8, "hidden_sizes": [16, 32], "depths": [2, 2], "num_labels": 4})
ENTRIES += add("vision", "RegNetForImageClassification", PICTURE,
     {"embedding_size": 8, "hidden_sizes": [16, 32], "depths": [2, 2], "groups_width": 8, "num_labels": 4})
ENTRIES += add("vision", "BitForImageClassification", PICTURE,
     {"embedding_size": 8, "hidden_sizes": [16, 32], "depths": [2, 2], "num_groups": 4, "num_labels": 4})
ENTRIES += wrapped("vision", "CvtForImageClassification", Double, PICTURE,
     {"embed_dim": [8, 16, 32], "num_heads": [1, 2, 4], "depth": [1, 2, 3], "num_labels": 4})
ENTRIES += add("vision", "EfficientNetForImageClassification", WIDE,
     {"image_size": 32, "width_coefficient": 0.25, "depth_coefficient": 0.3, "hidden_dim": 320, "num_labels": 4,
      "kernel_sizes": [3, 3], "in_channels": [8, 16], "out_channels": [16, 24], "depthwise_padding": [],
      "strides": [1, 2],
      "num_block_repeats": [1, 2], "expand_ratios": [1, 4]})
ENTRIES += add("vision", "FocalNetForImageClassification", PICTURE,
     {**SQUARE, "embed_dim": 8, "depths": [2, 2], "hidden_sizes": [8, 16], "focal_levels": [1, 1],
     "focal_windows": [3, 3],
      "patch_size": 2})
ENTRIES += add("vision", "HGNetV2ForImageClassification", PICTURE,
     {"stem_channels": [3, 8, 16], "stage_in_channels": [16, 32], "stage_mid_channels": [8, 16],
      "stage_out_channels": [32, 64], "stage_num_blocks": [1, 1], "stage_downsample": [False, True],
      "stage_light_block": [False, True], "stage_kernel_size": [3, 5], "stage_numb_of_layers": [2, 2],
      "depths": [1, 1], "hidden_sizes": [32, 64], "embedding_size": 16, "num_labels": 4})
ENTRIES += add("vision", "HieraForImageClassification", PICTURE,
     {**SQUARE, "image_size": [32, 32], "embed_dim": 8, "depths": [1, 1], "num_heads": [1, 2], "patch_kernel": [7, 7],
      "patch_stride": [4, 4], "patch_padding": [3, 3], "query_stride": [2, 2], "num_query_pool": 1,
      "masked_unit_size": [4, 4], "masked_unit_attention": [True, False], "embed_dim_multiplier": 2.0})
ENTRIES += wrapped("vision", "LevitForImageClassification", Double, {"pixel_values": normal(3, 64, 64),
    "labels": integers(high=4)},
     {"image_size": 64, "hidden_sizes": [16, 24, 32], "num_attention_heads": [2, 2, 2], "depths": [1, 1, 1],
      "key_dim": [4, 4, 4], "num_labels": 4})
ENTRIES += wrapped("vision", "MobileNetV1ForImageClassification", Double, WIDE, {"depth_multiplier": 0.25,
    "num_labels": 4})
ENTRIES += wrapped("vision", "MobileNetV2ForImageClassification", Double, WIDE, {"depth_multiplier": 0.25,
    "num_labels": 4})
ENTRIES += add("vision", "MobileViTForImageClassification", PICTURE,
     {"image_size": 32, "hidden_sizes": [16, 24, 32], "neck_hidden_sizes": [4, 8, 8, 16, 16, 16, 32],
      "num_attention_heads": 2, "num_labels": 4})
ENTRIES += wrapped(
    "vision",
    "MobileViTV2ForImageClassification",
    Double,
    {"pixel_values": normal(3, 128, 128), "labels": integers(high=4)},
    {"image_size": 128, "width_multiplier": 0.25, "num_labels": 4},
)
ENTRIES += add("vision", "PoolFormerForImageClassification", PICTURE,
     {"hidden_sizes": [8, 16, 24, 32], "depths": [1, 1, 1, 1], "num_labels": 4})
ENTRIES += add("vision", "PvtForImageClassification", {"pixel_values": normal(3, 64, 64), "labels": integers(high=4)},
     {"image_size": 64, "hidden_sizes": [8, 16, 24, 32], "depths": [1, 1, 1, 1], "num_attention_heads": [1, 2, 2, 4],
      "num_labels": 4})
ENTRIES += add("vision", "PvtV2ForImageClassification", PICTURE,
     {"image_size": 32, "hidden_sizes": [8, 16, 24, 32], "depths": [1, 1, 1, 1], "num_attention_heads": [1, 2, 2, 4],
      "num_labels": 4})
ENTRIES += add(
    "vision",
    "SegformerForImageClassification",
    PICTURE,
    {"hidden_sizes": [8, 16, 24, 32], "depths": [1, 1, 1, 1], "num_attention_heads": [1, 2, 2, 4], "num_labels": 4},
)
ENTRIES += wrapped("vision", "SwiftFormerForImageClassification", Double, PICTURE,
     {"image_size": 32, "depths": [1, 1, 1, 1], "embed_dims": [8, 16, 24, 32], "num_labels": 4})
ENTRIES += add("vision", "TextNetForImageClassification", WIDE,
     {"num_labels": 4, "stem_out_channels": 8, "hidden_sizes": [8, 8, 16, 16, 32]})
ENTRIES += add("vision", "ImageGPTForImageClassification", {"input_ids": TOKENS, "labels": integers(high=4)},
     {"vocab_size": VOCABULARY, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64, "num_labels": 4})
ENTRIES += add("vision", "ViTForMaskedImageModeling", {"pixel_values": IMAGE, "bool_masked_pos": integers(16)},
     {**VISION, "encoder_stride": 8})
ENTRIES += add("vision", "ViTMAEForPreTraining", {"pixel_values": IMAGE, "noise": normal(16)},
     {**VISION, "decoder_hidden_size": 32, "decoder_num_hidden_layers": 1, "decoder_num_attention_heads": 4,
      "decoder_intermediate_size": 64})
ENTRIES += add("vision", "PerceiverForImageClassificationLearned", {"inputs": IMAGE, "labels": integers(high=4)},
     {"num_latents": 8, "d_latents": 32, "num_blocks": 1, "num_self_attends_per_block": 2,
     "num_self_attention_heads": 4,
      "num_cross_attention_heads": 1, "image_size": 32, "num_labels": 4})

ENTRIES += add("segmentation, depth", "SegformerForSemanticSegmentation", MAP,
     {"hidden_sizes": [8, 16, 24, 32], "depths": [1, 1, 1, 1], "num_attention_heads": [1, 2, 2, 4],
      "decoder_hidden_size": 16, "num_labels": 4})
ENTRIES += add("segmentation, depth", "BeitForSemanticSegmentation", MAP,
     {**VISION, "num_hidden_layers": 4, "out_indices": [1, 2, 3, 4], "semantic_loss_ignore_index": 255,
      "use_auxiliary_head": True, "auxiliary_channels": 16, "pool_scales": [1, 2]})
ENTRIES += wrapped("segmentation, depth", "MobileNetV2ForSemanticSegmentation", Double, WIDE_MAP,
    {"depth_multiplier": 0.25,
    "num_labels": 4})
ENTRIES += add("segmentation, depth", "MobileViTForSemanticSegmentation", WIDE_MAP,
     {"image_size": 32, "hidden_sizes": [16, 24, 32], "neck_hidden_sizes": [4, 8, 8, 16, 16, 16, 32],
      "num_attention_heads": 2, "num_labels": 4, "aspp_out_channels": 16})
ENTRIES += add("segmentation, depth", "DPTForSemanticSegmentation", MAP,
     {**VISION, "num_hidden_layers": 4, "backbone_out_indices": [0, 1, 2, 3], "neck_hidden_sizes": [8, 8, 16, 16],
      "fusion_hidden_size": 16, "is_hybrid": False, "auxiliary_loss_weight": 0.0})
ENTRIES += add("segmentation, depth", "GLPNForDepthEstimation", DEPTH,
     {"hidden_sizes": [8, 16, 24, 32], "depths": [1, 1, 1, 1], "num_attention_heads": [1, 2, 2, 4],
      "decoder_hidden_size": 16})
ENTRIES += add("segmentation, depth", "UperNetForSemanticSegmentation", MAP,
     {"backbone_config": {"model_type": "convnext", "hidden_sizes": [8, 8, 16, 16], "depths": [1, 1, 1, 1],
                          "out_features": ["stage1", "stage2", "stage3", "stage4"]},
      "hidden_size": 16, "num_labels": 4, "auxiliary_in_channels": 16, "auxiliary_channels": 16})
ENTRIES += add(
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
