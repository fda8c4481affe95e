"""Small random bidirectional models: images, sound and text. Class -> (model type, what differs from shrunk)."""

from __future__ import annotations

from typing import Any

PATCH = {"patch_size": 8}
WINDOWS = {"embed_dim": 16, "depths": [2, 2], "num_heads": [2, 4], "window_size": 4, "patch_size": 2}
PYRAMID = {"num_encoder_blocks": 2, "hidden_sizes": [16, 32], "depths": [1, 2], "num_attention_heads": [1, 2]}
PYRAMID |= {"patch_sizes": [4, 2], "strides": [4, 2], "mlp_ratios": [2, 2], "sr_ratios": [2, 1]}
OVERLAP = PYRAMID | {"patch_sizes": [7, 3], "decoder_hidden_size": 16}
SOUND = {"max_source_positions": 20, "max_target_positions": 40, "num_mel_bins": 8, "init_std": 0.3}
SPECTROGRAM = {"max_length": 32, "num_mel_bins": 16, "patch_size": 8, "frequency_stride": 4, "time_stride": 4}
TEXT = {"is_decoder": False}

ENCODERS: dict[str, tuple[str, dict[str, Any]]] = {
    "ViTForImageClassification": ("vit", PATCH),
    "DeiTForImageClassification": ("deit", PATCH),
    "Dinov2ForImageClassification": ("dinov2", PATCH),
    "Dinov2WithRegistersForImageClassification": ("dinov2_with_registers", PATCH),
    "DINOv3ViTModel": ("dinov3_vit", {**PATCH, "num_register_tokens": 2}),
    "BeitForImageClassification": (
        "beit",
        {**PATCH, "use_relative_position_bias": True, "out_indices": [0, 1, 2, 3]},
    ),
    "CLIPModel": ("clip", {}),
    "CLIPVisionModel": ("clip_vision_model", PATCH),
    "SiglipVisionModel": ("siglip_vision_model", PATCH),
    "SiglipModel": ("siglip", {}),
    "SwinForImageClassification": ("swin", WINDOWS),
    "Swinv2ForImageClassification": ("swinv2", WINDOWS),
    "PvtForImageClassification": ("pvt", {**PYRAMID, "sequence_reduction_ratios": [2, 1]}),
    "PvtV2ForImageClassification": ("pvt_v2", OVERLAP),
    "SegformerForImageClassification": ("segformer", OVERLAP),
    "YolosForObjectDetection": ("yolos", {**PATCH, "image_size": [32, 48], "num_detection_tokens": 4}),
    "VideoMAEForVideoClassification": ("videomae", {**PATCH, "num_frames": 4}),
    "WhisperForAudioClassification": ("whisper", SOUND),
    "WhisperForConditionalGeneration": ("whisper", SOUND),
    "ASTForAudioClassification": ("audio-spectrogram-transformer", SPECTROGRAM),
    "BertForMaskedLM": ("bert", TEXT),
    "RobertaForMaskedLM": ("roberta", TEXT),
    "DistilBertForMaskedLM": ("distilbert", {}),
    "AlbertForMaskedLM": ("albert", {}),  # one layer four times
    "ElectraForMaskedLM": ("electra", TEXT),
    "ModernBertForMaskedLM": ("modernbert", {}),
    "LayoutLMForMaskedLM": ("layoutlm", {}),  # its attention does not say which way it looks
}
# Where no grid is: linear attention alone fits.
WITHOUT_GRID: dict[str, tuple[str, dict[str, Any]]] = {
    "Siglip2VisionModel": ("siglip2_vision_model", {"num_patches": 16, "patch_size": 4}),
    "ViTMAEModel": ("vit_mae", PATCH),
    "HieraForImageClassification": ("hiera", {}),
}
