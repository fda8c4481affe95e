"""Small random pipelines of diffusers."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from transformers import Gemma2Config, Gemma2Model, PreTrainedTokenizerFast, T5Config, T5EncoderModel

WORDS = ["<pad>", "</s>", "<unk>", "a", "red", "cat", "on", "blue", "grass"]
PROMPT = "a red cat on grass"


def tokenizer() -> Any:
    """One token for each of a few words."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = Tokenizer(models.WordLevel({word: n for n, word in enumerate(WORDS)}, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>", eos_token="</s>", unk_token="<unk>")


def transformer(kind: str, **changes: Any) -> Any:
    """A random transformer of one of the three classes, the same at each call."""
    import diffusers

    small: dict[str, Any] = {"num_attention_heads": 2, "attention_head_dim": 12, "num_layers": 2, "in_channels": 4}
    small |= {
        "DiTTransformer2DModel": {"out_channels": 8, "sample_size": 8, "num_embeds_ada_norm": 1000},
        "SanaTransformer2DModel": {
            **{"out_channels": 4, "num_cross_attention_heads": 2, "cross_attention_head_dim": 12, "sample_size": 8},
            **{"cross_attention_dim": 24, "caption_channels": 16},
        },
        "WanTransformer3DModel": {
            **{"out_channels": 4, "text_dim": 16, "freq_dim": 16, "ffn_dim": 32, "rope_max_seq_len": 32},
        },
    }[kind]
    with torch.random.fork_rng():
        torch.manual_seed(11)
        model = getattr(diffusers, kind)(**{**small, **changes}).eval()
        for parameter in model.parameters():  # initial values are so small that attention is uniform
            mean = float(parameter.data.mean()) if parameter.ndim == 1 else 0.0
            torch.nn.init.normal_(parameter.data, mean, 0.1 if parameter.ndim == 1 else 0.4)
    return model


def pipeline(kind: str, **more: Any) -> Any:
    """A pipeline around `transformer`, each part of it as small as can be."""
    import diffusers

    torch.manual_seed(12)
    model = transformer(kind)
    if kind == "DiTTransformer2DModel":
        vae = diffusers.AutoencoderKL(block_out_channels=(8,), latent_channels=4, norm_num_groups=4, sample_size=8)
        return diffusers.DiTPipeline(model, vae, diffusers.DDIMScheduler(), id2label={"1": "cat"})
    if kind == "SanaTransformer2DModel":
        text = Gemma2Config(
            **{"vocab_size": 16, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "head_dim": 8},
            **{"num_attention_heads": 2, "num_key_value_heads": 2},
        )
        vae = diffusers.AutoencoderDC(
            **{"in_channels": 3, "latent_channels": 4, "attention_head_dim": 2, "scaling_factor": 0.4},
            **{"encoder_block_out_channels": (8, 8), "decoder_block_out_channels": (8, 8)},
            **{"encoder_layers_per_block": (1, 1), "decoder_layers_per_block": (1, 1)},
            **{"encoder_qkv_multiscales": ((), (5,)), "decoder_qkv_multiscales": ((), (5,))},
            **{"encoder_block_types": "ResBlock", "decoder_block_types": "ResBlock"},
            **{"upsample_block_type": "interpolate", "downsample_block_type": "stride_conv"},
            **{"decoder_norm_types": "rms_norm", "decoder_act_fns": "silu"},
        )
        scheduler = diffusers.FlowMatchEulerDiscreteScheduler()
        return diffusers.SanaPipeline(tokenizer(), Gemma2Model(text), vae, model, scheduler)
    text = T5Config(**{"vocab_size": 16, "d_model": 16, "d_kv": 8, "d_ff": 16, "num_layers": 1, "num_heads": 2})
    vae = diffusers.AutoencoderKLWan(base_dim=3, z_dim=4, dim_mult=[1, 1, 1, 1], num_res_blocks=1,
                                       latents_mean=[0.1] * 4, latents_std=[2.0] * 4)  # fmt: skip
    scheduler = diffusers.FlowMatchEulerDiscreteScheduler()
    parts = {"tokenizer": tokenizer(), "text_encoder": T5EncoderModel(text).eval(), "vae": vae, "scheduler": scheduler}
    return diffusers.WanPipeline(**parts, transformer=model, **more)


def sample(made: Any) -> torch.Tensor:
    """What two steps of a small pipeline make of fixed noise."""
    kind = type(made).__name__
    arguments: dict[str, Any] = {"num_inference_steps": 2, "output_type": "latent", "guidance_scale": 3.0}
    if kind == "DiTPipeline":
        arguments |= {"class_labels": [1, 2], "output_type": "np"}
    else:
        arguments |= {"prompt": PROMPT, "height": 32, "width": 64, "max_sequence_length": 8}
    if kind == "SanaPipeline":
        arguments |= {"use_resolution_binning": False, "complex_human_instruction": None}
    if kind == "WanPipeline":
        arguments |= {"num_frames": 9}
    made.set_progress_bar_config(disable=True)
    with torch.no_grad():
        found = made(**arguments, generator=torch.Generator().manual_seed(3))
    return torch.as_tensor(found.frames if kind == "WanPipeline" else found.images)


def saved_pipelines(place: Path, kinds: Iterable[str]) -> dict[str, Path]:
    """Class of the transformer -> the folder in `place` of a saved pipeline around it."""
    found = {kind: place / kind for kind in kinds}
    for kind, folder in found.items():
        pipeline(kind).save_pretrained(folder)
    return found
