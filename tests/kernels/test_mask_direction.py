"""Masks in which an architecture lets tokens see later ones, for images and prefixes: refused by name, never half done.

Masks that a caller makes are in test_masks.py.
"""

from __future__ import annotations

import functools
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from architectures import OPTIONS, shrunk
from conftest import TOLERANCE, relative_error
from models import HYBRID, Zoo, load, logits, tokens
from torch import Tensor
from transformers.masking_utils import (
    and_masks,
    bidirectional_mask_function,
    blockwise_overlay,
    causal_mask_function,
    create_causal_mask,
    or_masks,
    packed_sequence_mask_function,
    sliding_window_causal_mask_function,
)
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from linearize.convert import convert, plan_conversion
from linearize.errors import LinearizeError
from linearize_kernels.hf.interface import direction
from linearize_kernels.layout import check_direction

EXACT = TOLERANCE[torch.float32]
T = 12
TEXT = torch.full((2, T), -1)
IMAGE = TEXT.clone()
IMAGE[:, 2:6] = 0
# Token 1 sees token 5, and none of those between.
APART = TEXT.clone()
APART[:, [1, 5]] = 0
AHEAD = r"layers\.\d\.self_attn: this call lets tokens see later ones"


def ahead(row: Any, head: Any, query: Any, key: Any) -> Any:
    """A prefix of four tokens that see each other."""
    return (query < 4) & (key < 4)


def with_mask(model: Any, padding: Tensor | None = None, **given: Any) -> Tensor:
    """Logits under a mask that the architecture's own code would make for `given`."""
    ids = tokens(2, T)
    embeds = model.get_input_embeddings()(ids)
    places = torch.arange(T)[None] if padding is None else (padding.cumsum(-1) - 1).clamp_min(0)
    mask = create_causal_mask(model.config, embeds, padding, None, **given)
    return logits(model, ids, attention_mask=mask, position_ids=places)


@pytest.mark.parametrize("layers", ["all", HYBRID])
def test_a_mask_that_looks_ahead_is_refused(zoo: Zoo, layers: str) -> None:
    model = zoo.model("llama", layers)
    for given in ({"block_sequence_ids": IMAGE}, {"block_sequence_ids": APART}, {"or_mask_function": ahead}):
        with pytest.raises(ValueError, match=AHEAD):
            with_mask(model, **given)
        with model.teacher():
            with_mask(model, **given)


@pytest.mark.parametrize("layers", ["all", HYBRID])
def test_the_same_of_text_alone_is_plain(zoo: Zoo, layers: str) -> None:
    """Processors number the blocks of texts without an image as well; what padding sees does not count."""
    model = zoo.model("llama", layers)
    left = torch.ones(2, T, dtype=torch.long)
    left[1, :3] = 0
    blocks = TEXT.clone()
    blocks[1, :3] = 0
    for padding in (None, left):
        plain = with_mask(model, padding)
        for given in ({"block_sequence_ids": TEXT}, {"block_sequence_ids": blocks}, {"and_mask_function": ahead}):
            if padding is None and given.get("block_sequence_ids") is blocks:
                continue
            if layers == "all" or "and_mask_function" not in given:
                found = with_mask(model, padding, **given)
                real = left.bool() if padding is not None else torch.ones(2, T, dtype=torch.bool)
                assert relative_error(found[real], plain[real]) < EXACT


def test_decoding_goes_on_behind_text(zoo: Zoo) -> None:
    """One new token sees none later, whatever the function says; several do."""
    model, ids = zoo.model("llama"), tokens(2, T)
    with torch.no_grad():
        cache = model(ids[:, :8], use_cache=True).past_key_values
        embeds = model.get_input_embeddings()(ids)
        mask = create_causal_mask(model.config, embeds[:, 8:9], None, cache, or_mask_function=ahead)
        assert mask is None
        mask = create_causal_mask(model.config, embeds[:, 8:], None, cache, block_sequence_ids=torch.full((2, T), 0))
        with pytest.raises(ValueError, match=AHEAD):
            model(ids[:, 8:], past_key_values=cache, attention_mask=mask)


def test_functions_tell_their_direction() -> None:
    blocks = blockwise_overlay(IMAGE)
    packed = packed_sequence_mask_function(torch.zeros(2, T))
    plain = causal_mask_function, sliding_window_causal_mask_function(4), and_masks(causal_mask_function, packed)
    for function in plain:
        assert direction(function, False) == "causal"
        assert direction(or_masks(function, blocks), False) == "mixed"
        assert direction(and_masks(or_masks(function, blocks), packed), False) == "mixed"
    assert direction(None, False) == "causal"
    assert direction(lambda *places: True, False) == "mixed"
    assert direction(bidirectional_mask_function, True) == "bidirectional"
    assert direction(bidirectional_mask_function, False) == "mixed"


def test_masks_without_a_name_are_read() -> None:
    """As on a second device, where the copy says nothing of how it was asked for."""
    causal = torch.ones(6, 6, dtype=torch.bool).tril()[None, None]
    prefix = causal.clone()
    prefix[..., :3, :3] = True
    both = torch.ones_like(causal)
    for mask in (causal, prefix, both):
        added = torch.zeros(mask.shape).masked_fill(~mask, torch.finfo(torch.float32).min)
        for form in (mask, added):
            fits = [mask is causal, mask is both]
            for looks_back, fit in zip((True, False), fits, strict=True):
                if fit:
                    check_direction(SimpleNamespace(path="a"), form, 6, None, looks_back)
                    continue
                with pytest.raises(ValueError, match=r"a.*this"):
                    check_direction(SimpleNamespace(path="a"), form, 6, None, looks_back)


@pytest.mark.slow
def test_compiled_graphs_refuse(zoo: Zoo) -> None:
    torch._dynamo.reset()
    model, ids = zoo.model("llama", HYBRID), tokens(2, T)
    compiled = torch.compile(with_mask, backend="aot_eager")
    with torch.no_grad():
        assert relative_error(compiled(model, block_sequence_ids=TEXT), logits(model, ids)) < EXACT
        with pytest.raises(RuntimeError, match=r"layers.*follow"):  # it cannot tell who made the mask
            compiled(model, block_sequence_ids=IMAGE)


def test_layers_share_one_compiled_check() -> None:
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    checked = functools.partial(check_direction, T=6, seen=None, causal=True)
    graph = torch.compile(checked, backend="aot_eager", fullgraph=True)
    both = torch.ones(1, 1, 6, 6, dtype=torch.bool)
    for path in "ab":
        graph(SimpleNamespace(path=path), both.tril())
    with pytest.raises(RuntimeError, match=r"tokens.*later"):
        graph(SimpleNamespace(path="a"), both)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1


# ---------------------------------------------------------------- architectures that ask for such masks

IMAGE_ID = 100
WITH_IMAGES = {
    "gemma3": ("Gemma3ForConditionalGeneration", "token_type_ids", {"mm_tokens_per_image": 4}),
    "gemma4": ("Gemma4ForConditionalGeneration", "mm_token_type_ids", {}),
    "gemma4_unified": ("Gemma4UnifiedForConditionalGeneration", "mm_token_type_ids", {}),
}

DECODERS = {
    "paligemma": "PaliGemmaForConditionalGeneration",
    "gemma2": "Gemma2ForCausalLM",
    "gemma": "GemmaForCausalLM",
}


def converted(folder: Path, config: Any, class_name: str, mechanism: str = "gsa", layers: str = "all") -> Any:
    """A random model of `config`, converted."""
    torch.manual_seed(0)
    getattr(transformers, class_name)._from_config(config).save_pretrained(folder / "source")
    options = OPTIONS if mechanism == "gsa" else {}
    plan = plan_conversion(str(folder / "source"), mechanism, layers=layers, options=options)
    convert(*plan, folder / "linear", level="none", say=lambda text: None)
    if class_name.endswith("Model"):
        return transformers.AutoModel.from_pretrained(folder / "linear", trust_remote_code=True).eval()
    return load(folder / "linear")


def with_images(name: str) -> tuple[Any, str, str]:
    """A small config of a model of text and images, its class, and what it calls the kinds of its tokens."""
    if name not in CONFIG_MAPPING:
        pytest.skip(f"transformers {transformers.__version__} has no {name}")
    class_name, kinds, changes = WITH_IMAGES[name]
    arguments = {**shrunk(CONFIG_MAPPING[name]), "image_token_id": IMAGE_ID, **changes}
    if name == "gemma4":
        arguments["text_config"]["use_bidirectional_attention"] = "vision"
    return CONFIG_MAPPING[name](**arguments), class_name, kinds


@pytest.mark.parametrize("layers", ["all", "every:2"])
@pytest.mark.parametrize("name", WITH_IMAGES)
def test_tokens_of_images_are_refused_and_texts_go_on(tmp_path: Path, name: str, layers: str) -> None:
    config, class_name, kinds = with_images(name)
    model, ids = converted(tmp_path, config, class_name, layers=layers), tokens(2, T)
    types = torch.zeros(2, T, dtype=torch.long)
    assert relative_error(logits(model, ids, **{kinds: types}), logits(model, ids)) < EXACT
    asked = {"max_new_tokens": 3, "min_new_tokens": 3, "do_sample": False}
    texts = model.generate(ids, **asked)
    assert torch.equal(texts, model.generate(ids, **{kinds: types}, **asked))
    types[:, 2:6] = 1
    with pytest.raises(ValueError, match=AHEAD):
        logits(model, ids, **{kinds: types})
    with pytest.raises(ValueError, match=AHEAD):
        model.generate(ids, **{kinds: types}, **asked)
    with model.teacher():
        logits(model, ids, **{kinds: types})


def test_attention_with_code_of_its_own_refuses_images(tmp_path: Path) -> None:
    """GIT computes softmax itself, and puts its images before the text."""
    kind = CONFIG_MAPPING["git"]
    model, ids = converted(tmp_path, kind(**shrunk(kind)), "GitForCausalLM"), tokens(2, T)
    other = ids.clone()
    other[:, -1] = (other[:, -1] + 1) % 90
    assert torch.equal(logits(model, ids)[:, :-1], logits(model, other)[:, :-1])
    images = torch.randn(2, 3, 32, 32)
    with pytest.raises(ValueError, match=r"tokens.*later"):
        logits(model, ids, pixel_values=images)
    with model.teacher():
        logits(model, ids, pixel_values=images)


def test_layers_that_get_plain_masks_take_images(tmp_path: Path) -> None:
    """Gemma 4's full attention looks back only, even at images: its sliding layers, which do not, keep softmax."""
    config, class_name, kinds = with_images("gemma4")
    full = [i for i, kind in enumerate(config.text_config.layer_types) if kind == "full_attention"]
    model, ids = converted(tmp_path, config, class_name, layers=",".join(map(str, full))), tokens(2, T)
    types = torch.zeros(2, T, dtype=torch.long)
    plain = logits(model, ids, **{kinds: types})
    types[:, 2:6] = 1
    assert relative_error(logits(model, ids, **{kinds: types}), plain) > 1e-3


@pytest.mark.parametrize("name", DECODERS)
def test_a_decoder_that_is_said_not_to_be_causal_is_refused(tmp_path: Path, name: str) -> None:
    """PaliGemma's prefix sees later tokens, its suffix does not; a bidirectional layer would let both."""
    kind = CONFIG_MAPPING[name]
    changes = {"image_token_id": IMAGE_ID} if name == "paligemma" else {"use_bidirectional_attention": True}
    with pytest.raises(LinearizeError, match=r"layers\.0\.self_attn"):
        converted(tmp_path, kind(**{**shrunk(kind), **changes}), DECODERS[name], "la")


def test_a_decoder_without_causal_masks_is_an_encoder(tmp_path: Path) -> None:
    """EmbeddingGemma: it asks for causal masks with every later token added."""
    kind = CONFIG_MAPPING["gemma3_text"]
    config = kind(**shrunk(kind), use_bidirectional_attention=True)
    model, ids = converted(tmp_path, config, "Gemma3TextModel", "la"), tokens(2, T)
    other = ids.clone()
    other[:, -1] = (other[:, -1] + 1) % 90
    with torch.no_grad():
        found, changed = model(ids).last_hidden_state, model(other).last_hidden_state
    assert relative_error(changed[:, 0], found[:, 0]) > 1e-4
    embeds = model.get_input_embeddings()(ids)
    mask = create_causal_mask(model.config, embeds, None, None, block_sequence_ids=IMAGE)
    with pytest.raises(ValueError, match=r"tokens.*earlier"):
        model(ids, attention_mask={"full_attention": mask, "sliding_attention": mask})
