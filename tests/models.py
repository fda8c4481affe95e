"""Small random models of several architectures, converted once and reused, and the comparisons tests make."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor

from linearize.convert import convert, plan_conversion
from linearize.plan.mechanisms import load_mechanism
from linearize_kernels.hf.attention_hooks import attach
from linearize_kernels.hf.capture import capture

VOCAB = 97
SMALL = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 256,
    # Large enough that attention is far from uniform, so that ignoring a mask or a position shows.
    "initializer_range": 0.3,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": 0,
}
# Architecture -> (config class, what differs from SMALL).
ARCHITECTURES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", {}),
    "qwen2": ("Qwen2Config", {"tie_word_embeddings": True}),
    "qwen3": ("Qwen3Config", {}),
    "mistral": ("MistralConfig", {"sliding_window": 6}),
    "gemma2": ("Gemma2Config", {"sliding_window": 6, "query_pre_attn_scalar": 16}),
    "gpt2": ("GPT2Config", {"n_embd": 32, "n_layer": 4, "n_head": 4, "n_positions": 256}),
    "phi3": ("Phi3Config", {}),
}
HYBRID = "0,2"


def small_config(name: str, **changes: Any) -> Any:
    """The config of a small model of architecture `name`."""
    kind, differences = ARCHITECTURES[name]
    keep = ("vocab_size", "initializer_range", "bos_token_id", "eos_token_id", "pad_token_id")
    common = {k: SMALL[k] for k in keep} if name == "gpt2" else SMALL
    return getattr(transformers, kind)(**{**common, **differences, **changes})


def small_model(name: str, **changes: Any) -> Any:
    """A random model, the same at each call, in eval mode."""
    with torch.random.fork_rng():
        torch.manual_seed(11)
        model = transformers.AutoModelForCausalLM.from_config(small_config(name, **changes)).eval()
        # Initialisers write zeros and ones that would hide a bias or a norm that went lost.
        for parameter in model.parameters():
            if parameter.ndim == 1:
                torch.nn.init.normal_(parameter.data.add_(0.0), float(parameter.data.mean()), 0.1)
    return model


def save_source(folder: Path, name: str = "llama", shard: str = "5GB", **changes: Any) -> Path:
    """A source checkpoint in `folder`."""
    small_model(name, **changes).save_pretrained(folder, max_shard_size=shard)
    return folder


def convert_folder(source: Path, output: Path, layers: str = "all", level: Any = "none", **arguments: Any) -> Path:
    """`linearize convert` of a local folder, with 8 slots; options of the mechanism go in `options`."""
    options = {"slots": 8, "chunk_size": 16, **arguments.pop("options", {})}
    plan = plan_conversion(str(source), "gsa", layers=layers, options=options, **arguments)
    trust = arguments.get("trust_remote_code", False)
    convert(*plan, output, level=level, trust_remote_code=trust, say=lambda text: None)
    return output


def load(folder: Path, **arguments: Any) -> Any:
    """The converted model as any user loads it, in eval mode; every key must be accounted for."""
    model, report = transformers.AutoModelForCausalLM.from_pretrained(
        folder, trust_remote_code=True, output_loading_info=True, **arguments
    )
    assert not any(report.values()), report
    return model.eval()


@cache
def _folders(root: Path, name: str, layers: str, options: tuple[tuple[str, Any], ...]) -> tuple[Path, Path]:
    place = root / "-".join([name, layers.replace(",", "_"), *(f"{k}={v}" for k, v in options)])
    source = save_source(place / "source", name)
    return source, convert_folder(source, place / "linear", layers, options=dict(options))


class Zoo:
    """Source and converted folders of each architecture, made on first use and kept for the test session."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def folders(self, name: str, layers: str = "all", **options: Any) -> tuple[Path, Path]:
        """(source, converted)."""
        return _folders(self.root, name, layers, tuple(sorted(options.items())))

    def model(self, name: str, layers: str = "all", **options: Any) -> Any:
        """The converted model, loaded anew."""
        return load(self.folders(name, layers, **options)[1])


def source_with_mixers(source: Path, converted: Path) -> Any:
    """The reference: the source class on the source's weights, with the package's mixers attached."""
    from safetensors.torch import load_file

    head = json.loads((source / "config.json").read_text())["architectures"][0]
    model = getattr(transformers, head, transformers.AutoModelForCausalLM).from_pretrained(source)
    spec = json.loads((converted / "config.json").read_text())["linearize"]
    names = {layer["mechanism"] for layer in spec["layers"]}
    mechanisms = {name: load_mechanism(name) for name in names}
    routed = all(layer["site"]["routed"] for layer in spec["layers"])
    attach(model, spec, mechanisms, None if routed else capture)
    mixers = load_file(converted / "model-mixers.safetensors")
    assert not model.load_state_dict(mixers, strict=False).unexpected_keys
    return model.eval()


def copied(folder: Path, target: Path) -> Path:
    """A copy that may be damaged."""
    target.mkdir()
    for path in folder.iterdir():
        (target / path.name).write_bytes(path.read_bytes())
    return target


def tokens(batch: int, length: int, seed: int = 3) -> Tensor:
    """Random token ids [batch, length], never the padding token."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(1, VOCAB, (batch, length), generator=generator)


@torch.no_grad()
def logits(model: Any, ids: Tensor, **arguments: Any) -> Tensor:
    """Logits [B,T,V] of one pass without a cache."""
    return model(input_ids=ids, use_cache=False, **arguments).logits
