"""Generation and everything else a model is asked at run time: the ways a forward pass can be cut up all agree.

Logits are compared, not tokens: on random models equal tokens prove little.
"""

from __future__ import annotations

import copy
import pickle
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from conftest import TOLERANCE, relative_error
from models import ARCHITECTURES, HYBRID, Zoo, convert_folder, load, logits, save_source, small_model, tokens
from torch import Tensor
from transformers import AttentionInterface, DynamicCache, StaticCache
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, AttentionMaskInterface
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from linearize.plan.mechanisms import build_mixer, resolve_options
from linearize_kernels.hf.attention_hooks import mixers_of
from linearize_kernels.hf.cache import StateLayer
from linearize_kernels.hf.interface import register_backend
from linearize_kernels.layers.rotary import Rotation
from linearize_kernels.layers.scan import numbered
from linearize_kernels.layout import Grid, TokenLayout, joined, part_of
from linearize_kernels.mixer import AttentionSite

ROOT = Path(__file__).resolve().parents[2]
EXACT = TOLERANCE[torch.float32]
MODELS = [(name, layers) for name in ARCHITECTURES for layers in ("all", HYBRID)]
# A hybrid has both kinds of layers; models are quick for one with a mask, one without, and one of learned positions.
QUICK = [("llama", "all"), ("llama", HYBRID), ("gemma2", "all"), ("gemma2", HYBRID), ("gpt2", HYBRID)]
every_model = pytest.mark.parametrize(
    ("name", "layers"), [pytest.param(*model, marks=() if model in QUICK else pytest.mark.slow) for model in MODELS]
)
# One of each kind of mask: none, a padding mask, a full 4D mask, sliding and full 4D masks by layer.
some_models = pytest.mark.parametrize(
    ("name", "layers"), [("llama", "all"), ("llama", HYBRID), ("mistral", "1,3"), ("gemma2", "0,2"), ("gemma2", "1,3")]
)


def steps(model: Any, ids: Tensor, *lengths: int, cache: Any = None, mask: Tensor | None = None) -> Tensor:
    """Logits of `ids` taken in pieces of these lengths, the rest token by token, through one cache."""
    pieces, start = [], 0
    lengths += (1,) * (ids.shape[1] - sum(lengths))
    for length in lengths:
        end = start + length
        extra = {} if mask is None else {"attention_mask": mask[:, :end], "position_ids": places(mask)[:, start:end]}
        with torch.no_grad():
            out = model(input_ids=ids[:, start:end], past_key_values=cache, use_cache=True, **extra)
        cache, start = out.past_key_values, end
        pieces.append(out.logits)
    return torch.cat(pieces, 1)


def places(mask: Tensor) -> Tensor:
    """Positions as generate() makes them from a padding mask."""
    return (mask.cumsum(-1) - 1).clamp(min=0)


# ---------------------------------------------------------------- cutting a sequence


@every_model
def test_prefill_and_steps_are_one_forward(zoo: Zoo, name: str, layers: str) -> None:
    model, ids = zoo.model(name, layers), tokens(2, 24)
    # 19 is no multiple of the chunk of 16.
    assert relative_error(steps(model, ids, 19), logits(model, ids)) < EXACT


@some_models
def test_a_prefill_in_pieces_is_one_forward(zoo: Zoo, name: str, layers: str) -> None:
    model, ids = zoo.model(name, layers), tokens(2, 24)
    assert relative_error(steps(model, ids, 5, 12, 2, cache=DynamicCache()), logits(model, ids)) < EXACT


def test_a_mask_that_hides_nothing_costs_nothing(zoo: Zoo, monkeypatch: pytest.MonkeyPatch) -> None:
    model, ids = zoo.model("llama"), tokens(2, 20)
    mixer, heard = mixers_of(model)["model.layers.0.self_attn"], []
    real = mixer.mix
    monkeypatch.setattr(mixer, "mix", lambda *call: (heard.append(call[4].padding), real(*call))[1])
    mask = torch.ones_like(ids)
    assert torch.equal(logits(model, ids, attention_mask=mask), logits(model, ids))
    mask[1, 0] = 0
    logits(model, ids, attention_mask=mask)
    assert [padding is None for padding in heard] == [True, True, False]


def test_positions_that_restart_mean_nothing_beside_a_mask(zoo: Zoo) -> None:
    model, ids = zoo.model("llama"), tokens(2, 20)
    places = (torch.arange(20) % 7).expand(2, -1)
    mask = torch.ones_like(ids)
    masked = logits(model, ids, attention_mask=mask, position_ids=places)
    assert relative_error(masked, logits(model, ids, position_ids=places)) > 0.01
    hidden = torch.cat([mask, mask.new_zeros(2, 1)], 1)
    longer, more = torch.cat([ids, ids[:, :1]], 1), torch.cat([places, places[:, -1:] + 1], 1)
    padded = logits(model, longer, attention_mask=hidden, position_ids=more)[:, :-1]
    assert relative_error(masked, padded) < EXACT


@every_model
@pytest.mark.parametrize("side", ["left", "right"])
def test_a_padded_batch_is_its_rows(zoo: Zoo, name: str, layers: str, side: str) -> None:
    model, ids = zoo.model(name, layers), tokens(3, 20)
    mask = torch.ones_like(ids)
    for row, pad in enumerate((0, 4, 17)):
        mask[row, :pad] = 0
    if side == "right":
        mask = mask.flip(1)
    batch = logits(model, ids, attention_mask=mask, position_ids=places(mask))
    for row in range(3):
        real = mask[row].bool()
        assert relative_error(batch[row, real], logits(model, ids[row, real][None])[0]) < EXACT


@some_models
def test_a_left_padded_batch_decodes_as_its_rows(zoo: Zoo, name: str, layers: str) -> None:
    model, ids = zoo.model(name, layers), tokens(2, 20)
    mask = torch.ones_like(ids)
    mask[1, :7] = 0
    batch = steps(model, ids, 11, mask=mask)
    assert relative_error(batch[1, 7:], logits(model, ids[1:, 7:])[0]) < EXACT
    assert relative_error(batch[0], logits(model, ids[:1])[0]) < EXACT


@pytest.mark.parametrize("name", ["llama", "mistral", "gemma2"])
def test_no_quadratic_mask_where_no_layer_needs_one(zoo: Zoo, name: str) -> None:
    model, ids, seen = zoo.model(name), tokens(2, 20), []

    def watch(module: Any, args: Any, kwargs: Any) -> None:
        seen.append(kwargs["attention_mask"])

    for layer in model.model.layers:
        layer.self_attn.register_forward_pre_hook(watch, with_kwargs=True)
    mask = torch.ones_like(ids)
    mask[0, :3] = 0
    logits(model, ids)
    assert seen == [None] * 4
    logits(model, ids, attention_mask=mask)
    assert all(found.shape == (2, 20) for found in seen[4:])


def test_padding_between_turns_is_skipped(zoo: Zoo) -> None:
    for layers in ("all", HYBRID):
        model, ids = zoo.model("llama", layers), tokens(1, 20)
        mask = torch.ones_like(ids)
        mask[0, 8:11] = 0
        real = mask[0].bool()
        with_gap = logits(model, ids, attention_mask=mask, position_ids=places(mask))[0, real]
        assert relative_error(with_gap, logits(model, ids[:, real])[0]) < EXACT


# ---------------------------------------------------------------- packed documents

LENGTHS = (7, 1, 12, 4)


def packed(ids: Tensor) -> dict[str, Tensor]:
    """position_ids that restart at each document."""
    return {"position_ids": torch.cat([torch.arange(n) for n in LENGTHS])[None].expand(ids.shape[0], -1)}


def each_document(model: Any, ids: Tensor) -> Tensor:
    """Logits of the documents taken one by one."""
    return torch.cat([logits(model, part) for part in ids.split(LENGTHS, 1)], 1)


@every_model
def test_packed_documents_are_separate(zoo: Zoo, name: str, layers: str) -> None:
    model, ids = zoo.model(name, layers), tokens(2, sum(LENGTHS))
    assert relative_error(logits(model, ids, **packed(ids)), each_document(model, ids)) < EXACT
    model.set_attn_implementation("eager")
    assert relative_error(logits(model, ids, **packed(ids)), each_document(model, ids)) < EXACT


def test_padding_between_packed_documents_joins_none(zoo: Zoo) -> None:
    """A 4D mask says which tokens are real and which belong together; padding has any position."""
    model, ids = zoo.model("llama"), tokens(1, sum(LENGTHS))
    places, real = packed(ids)["position_ids"].clone(), torch.ones(1, sum(LENGTHS), dtype=torch.bool)
    real[0, 5:8], places[0, 5:8], real[0, 12:14], places[0, 12:14] = False, 1, False, 1
    places[0, 14:20] -= 2
    document = torch.tensor([0] * 8 + [1] * 12 + [2] * (sum(LENGTHS) - 20))
    mask = (document[:, None] == document).tril() & real[0] & real[0, :, None]
    found = logits(model, ids, attention_mask=mask[None, None], position_ids=places)[real]
    documents = [ids[:, :5], torch.cat([ids[:, 8:12], ids[:, 14:20]], 1), ids[:, 20:]]
    assert relative_error(found, torch.cat([logits(model, part)[0] for part in documents])) < EXACT


def test_packed_documents_by_their_bounds(zoo: Zoo) -> None:
    model, ids = zoo.model("llama"), tokens(1, sum(LENGTHS))
    bounds = torch.tensor([0, *LENGTHS]).cumsum(0).int()
    # Positions that run on say nothing of documents; rotary embedding is relative, so the logits are the same.
    for positions in ({}, packed(ids)):
        ours = logits(model, ids, cu_seq_lens_q=bounds, cu_seq_lens_k=bounds, **positions)
        assert relative_error(ours, each_document(model, ids)) < EXACT


# ---------------------------------------------------------------- generate


def generate(model: Any, ids: Tensor, **arguments: Any) -> Any:
    """generate() with 8 new tokens and the logits of each."""
    settings = {"max_new_tokens": 8, "do_sample": False, "output_logits": True, "return_dict_in_generate": True}
    return model.generate(ids, pad_token_id=0, **(settings | arguments))


def scores(out: Any) -> Tensor:
    """[B, new tokens, V]."""
    return torch.stack(out.logits, 1)


@some_models
def test_greedy_uses_its_cache_rightly(zoo: Zoo, name: str, layers: str) -> None:
    model, ids = zoo.model(name, layers), tokens(2, 13)
    cached, uncached = generate(model, ids), generate(model, ids, use_cache=False)
    assert torch.equal(cached.sequences, uncached.sequences)
    assert relative_error(scores(cached), scores(uncached)) < EXACT
    whole = logits(model, cached.sequences[:, :-1])[:, 12:]
    assert relative_error(scores(cached), whole) < EXACT


@some_models
def test_a_left_padded_batch_generates_as_its_rows(zoo: Zoo, name: str, layers: str) -> None:
    model, ids = zoo.model(name, layers), tokens(2, 13)
    mask = torch.ones_like(ids)
    ids[1, :6], mask[1, :6] = 0, 0
    batch = generate(model, ids, attention_mask=mask)
    alone = generate(model, ids[1:, 6:])
    assert relative_error(scores(batch)[1], scores(alone)[0]) < EXACT


@some_models
def test_beams_carry_their_states(zoo: Zoo, name: str, layers: str) -> None:
    model, ids = zoo.model(name, layers), tokens(2, 9)
    cached = generate(model, ids, num_beams=3, num_return_sequences=2, output_scores=True)
    uncached = generate(model, ids, num_beams=3, num_return_sequences=2, output_scores=True, use_cache=False)
    assert torch.equal(cached.sequences, uncached.sequences)
    assert relative_error(cached.sequences_scores, uncached.sequences_scores) < EXACT
    assert cached.beam_indices.unique().numel() > 3  # the beams were reordered indeed


def test_sampling(zoo: Zoo) -> None:
    for layers in ("all", HYBRID):
        model, ids = zoo.model("llama", layers), tokens(2, 9)
        torch.manual_seed(5)
        cached = generate(model, ids, do_sample=True, top_k=20, num_return_sequences=3)
        torch.manual_seed(5)
        uncached = generate(model, ids, do_sample=True, top_k=20, num_return_sequences=3, use_cache=False)
        assert torch.equal(cached.sequences, uncached.sequences)
        assert relative_error(scores(cached), scores(uncached)) < EXACT


@some_models
def test_generation_goes_on_from_a_cache(zoo: Zoo, name: str, layers: str) -> None:
    model, ids = zoo.model(name, layers), tokens(1, 9)
    first = generate(model, ids, max_new_tokens=4)
    longer = torch.cat([first.sequences, tokens(1, 3, seed=8)], 1)  # the next turn of a conversation
    second = generate(model, longer, past_key_values=first.past_key_values)
    assert relative_error(scores(second), scores(generate(model, longer))) < EXACT


def test_a_prefill_by_chunks(zoo: Zoo) -> None:
    for layers in ("all", HYBRID):
        model, ids = zoo.model("llama", layers), tokens(2, 21)
        chunked = generate(model, ids, prefill_chunk_size=8)
        assert relative_error(scores(chunked), scores(generate(model, ids))) < EXACT


@some_models
def test_the_state_does_not_grow(zoo: Zoo, name: str, layers: str) -> None:
    model = zoo.model(name, layers)
    cache = generate(model, tokens(2, 40), use_cache=True).past_key_values
    states = [layer for layer in cache.layers if hasattr(layer, "state")]
    assert len(states) == len(mixers_of(model))
    for layer, mixer in zip(states, mixers_of(model).values(), strict=True):
        assert 2 * mixer.state_bytes(47) == sum(part.numel() * part.element_size() for part in layer.state)
        assert layer.get_seq_length() == 47
    assert cache.get_seq_length() == 47


@pytest.mark.parametrize("layers", ["all", HYBRID, "1,3"])
def test_a_static_cache_falls_back(zoo: Zoo, layers: str) -> None:
    model, ids = zoo.model("mistral", layers), tokens(2, 9)
    static = generate(model, ids, cache_implementation="static")
    assert relative_error(scores(static), scores(generate(model, ids))) < EXACT
    assert isinstance(static.past_key_values, DynamicCache)


@pytest.mark.parametrize("layers", [HYBRID, "1,3"])
def test_a_static_cache_by_hand_is_refused_in_hybrids(zoo: Zoo, layers: str) -> None:
    model = zoo.model("llama", layers)
    with pytest.raises(ValueError, match=r"static cache .* DynamicCache"):
        model(tokens(1, 4), past_key_values=StaticCache(model.config, max_cache_len=16))


def test_what_a_state_cannot_do_is_refused(zoo: Zoo) -> None:
    model, ids = zoo.model("llama"), tokens(1, 9)
    with pytest.raises(NotImplementedError, match=r"continuous batching .* linearize serve DIR"):
        model.generate_batch(ids.tolist(), max_new_tokens=2)
    with pytest.raises(NotImplementedError, match="continuous batching"), model.continuous_batching_context_manager():
        pass
    cache = model(ids, use_cache=True).past_key_values
    cache.crop(0)
    with pytest.raises(ValueError, match=r"crop\(-2\): .* 0 of the last ones were recorded.* activate_past_recording"):
        cache.crop(-2)
    with pytest.raises(ValueError, match=r"crop\(2\): pass -n"):
        cache.layers[0].crop(2)
    with pytest.raises(ValueError, match="already holds softmax keys"), torch.no_grad():
        model(ids, past_key_values=small_model("llama")(ids, use_cache=True).past_key_values)
    with pytest.raises(TypeError, match="pass a transformers Cache"):
        model.model.layers[0].self_attn(torch.zeros(1, 1, 32), past_key_values=((0, 0),))


# ---------------------------------------------------------------- tokens that are removed again

some_models = pytest.mark.parametrize(
    ("name", "layers", "options"),
    [("llama", "all", {}), ("llama", HYBRID, {}), ("gpt2", "all", {}), ("llama", "all", {"window": 4, "sink": 1})],
)


@some_models
def test_assisted_decoding_writes_what_plain_decoding_writes(
    zoo: Zoo, name: str, layers: str, options: dict[str, int]
) -> None:
    """By prompt lookup, by the source as assistant, and as an assistant of the source."""
    model, source, ids = zoo.model(name, layers, **options), small_model(name), tokens(1, 6).repeat(1, 3)
    plain = model.generate(ids, max_new_tokens=20, do_sample=False)
    for helper in ({"prompt_lookup_num_tokens": 3}, {"assistant_model": source}):
        assert torch.equal(model.generate(ids, max_new_tokens=20, do_sample=False, **helper), plain)
    plain = source.generate(ids, max_new_tokens=20, do_sample=False)
    assert torch.equal(source.generate(ids, max_new_tokens=20, do_sample=False, assistant_model=model), plain)


@some_models
@torch.no_grad()
def test_a_cache_that_records_its_past_is_cropped(zoo: Zoo, name: str, layers: str, options: dict[str, int]) -> None:
    """Across calls, twice, and back to what came before the first one; a copy of the cache can do it, too."""
    model, ids, other = zoo.model(name, layers, **options), tokens(1, 30), tokens(1, 12, seed=5)
    cache = model(ids[:, :11], use_cache=True).past_key_values
    cache.activate_past_recording()
    for start, stop in ((11, 16), (16, 17), (17, 24)):
        model(ids[:, start:stop], past_key_values=cache)
    cache.crop(-2)
    twin = copy.deepcopy(cache)
    for part, removed, kept in ((cache, 7, 15), (twin, 11, 11)):
        part.crop(-removed)
        assert part.get_seq_length() == kept
        whole = model(torch.cat([ids[:, :kept], other], 1)).logits[:, kept:]
        assert relative_error(model(other, past_key_values=part).logits, whole) < EXACT


def test_the_end_of_a_long_call_can_be_removed(zoo: Zoo, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its last UNDO tokens are kept, as copies; no more, and nothing once rows change their places."""
    model, ids = zoo.model("llama"), tokens(2, 40)
    layer = model(ids, use_cache=True).past_key_values.layers[0]
    monkeypatch.setitem(type(layer).absorb.__globals__, "UNDO", 8)  # of the file that the checkpoint carries
    mask = torch.ones(2, 40, dtype=torch.long)
    mask[1, :5] = 0
    cache = DynamicCache(config=model.config)
    cache.linearize_records_past = True
    logits = model(ids, attention_mask=mask, past_key_values=cache).logits[mask.bool()]
    assert relative_error(logits, model(ids, attention_mask=mask).logits[mask.bool()]) < EXACT
    with pytest.raises(ValueError, match="8 of the last ones were recorded"):
        cache.crop(-9)
    cache.crop(-8)
    again = model(ids[:, 32:], attention_mask=mask, past_key_values=cache).logits
    assert relative_error(again, model(ids, attention_mask=mask).logits[:, 32:]) < EXACT
    cache.batch_select_indices(torch.tensor([1]))
    with pytest.raises(ValueError, match="0 of the last ones"):
        cache.crop(-1)


@some_models
@torch.no_grad()
def test_200_single_tokens_leave_few_states(zoo: Zoo, name: str, layers: str, options: dict[str, int]) -> None:
    """Three at most, 128 tokens apart or before the last call; any of the last 128 tokens can be removed."""
    model, ids, cache = zoo.model(name, layers, **options), tokens(1, 206), DynamicCache()
    cache.linearize_records_past = True
    for t in range(200):
        model(ids[:, t : t + 1], past_key_values=cache)
    for layer in [layer for layer in cache.layers if hasattr(layer, "state")]:
        own = [tensor for call in layer.past for tensor in tensors_of(call.before)]
        assert 2 <= sum(call.kept for call in layer.past) <= 3
        assert sum(x.nbytes for x in own) <= 3 * sum(x.nbytes for x in tensors_of(layer.state))
        assert 128 <= sum(call.tokens for call in layer.past) < 2 * 128
    for removed in (1, 3, 64, 100, 128):  # within what the state before the last call knows, and behind others
        twin, stay = copy.deepcopy(cache), 200 - removed
        twin.crop(-removed)
        again = model(ids[:, stay : stay + 6], past_key_values=twin).logits
        assert relative_error(again, model(ids[:, : stay + 6]).logits[:, stay:]) < EXACT
        twin.crop(-8)
        assert (
            relative_error(
                model(ids[:, stay - 2 : stay], past_key_values=twin).logits, model(ids[:, :stay]).logits[:, -2:]
            )
            < EXACT
        )


def tensors_of(state: Any) -> list[Tensor]:
    """The tensors of a state, which may hold other states."""
    if isinstance(state, tuple):
        return [tensor for part in state for tensor in tensors_of(part)]
    return [state] if isinstance(state, Tensor) else []


@torch.no_grad()
def test_states_that_are_kept_at_8b_take_less_than_5_percent() -> None:
    """The most that is kept, three states and 255 tokens, in a layer of Llama 3.1 8B's shape, in bf16: the preset
    gsa-window in all 32 layers, or in 24 beside 8 that keep softmax over 4,096 tokens. 5 % of the weights alone."""
    preset = yaml.safe_load((ROOT / "recipes" / "gsa-window.yaml").read_text("utf-8"))["convert"]
    site = AttentionSite(0, "layer", "Attention", 4096, 32, 8, 128, 128, 128**-0.5, causal=True)
    weights, states, inputs = 2 * 8_030_261_248, {}, {}
    for name, options in ((preset["mechanism"], preset["options"]), ("window", {"window": 4096, "sink": 4})):
        mixer = build_mixer(name, site, resolve_options(name, options, site)).to(torch.bfloat16)
        mixer.reset_parameters()
        layer = StateLayer()
        for T in (1, 128, 126, 1):
            given = [torch.randn(1, T, *shape).bfloat16() for shape in ((32, 128), (8, 128), (8, 128), (4096,))]
            layer.absorb(mixer, tuple(given), TokenLayout())
            layer.activate_past_recording()
        assert [call.kept for call in layer.past] == [True, True, True]
        states[name] = sum(x.nbytes for call in layer.past for x in tensors_of(call.before))
        inputs[name] = sum(x.nbytes for call in layer.past for x in call.inputs)
    gsa, window = states["gsa"], states["window"]
    taken = {"states": 32 * gsa, "states and inputs": 32 * (gsa + inputs["gsa"]), "hybrid": 24 * gsa + 8 * window}
    print({what: f"{size / 2**20:.0f} MiB, {size / weights:.1%}" for what, size in taken.items()})
    assert max(taken.values()) <= 0.05 * weights


@torch.no_grad()
def test_calls_of_padded_rows_are_replayed_as_one(zoo: Zoo) -> None:
    """The tokens that stay are of several calls; only the first of these has a state, and a mask that hides tokens."""
    model, ids = zoo.model("llama"), tokens(2, 60)
    mask = torch.ones(2, 60, dtype=torch.long)
    mask[1, :5] = 0
    cache = DynamicCache()
    cache.linearize_records_past = True
    for start, stop in ((0, 20), (20, 21), (21, 40), (40, 41), (41, 42)):
        model(ids[:, start:stop], attention_mask=mask[:, :stop], past_key_values=cache)
    assert [call.kept for call in cache.layers[0].past] == [True, False, False, False, True]
    cache.crop(-12)
    again = model(ids[:, 30:], attention_mask=mask, past_key_values=cache).logits
    assert relative_error(again, model(ids, attention_mask=mask).logits[:, 30:]) < EXACT


def test_layouts_of_calls_are_joined() -> None:
    """Also those of calls that say nothing of padding or of documents; a call goes on in the last document."""
    chance = torch.Generator().manual_seed(0)
    x = torch.zeros(2, 12, 3)
    real = torch.ones(2, 12, dtype=torch.bool)
    real[1, :3] = False
    documents = torch.tensor([[0, 0, 1, 1, 1, 1, 1, 1, 1, 5, 5, 5], [0, 0, 0, 0, 2, 2, 2, 2, 2, 2, 2, 2]])
    angles = Rotation(*torch.rand(2, 1, 12, 4, generator=chance))
    whole = TokenLayout(real, documents, True, Grid((12,)), angles)
    parts = [part_of(whole, start, stop) for start, stop in ((0, 5), (5, 7), (7, 12))]
    parts[1] = parts[1]._replace(padding=None, segments=None)
    found = joined(parts, x.split([5, 2, 5], 1))
    assert torch.equal(found.padding, real)
    assert torch.equal(found.segments, numbered(documents))
    assert found.grid == whole.grid
    assert all(torch.equal(ours, theirs.expand(2, -1, -1)) for ours, theirs in zip(found.rotation, angles, strict=True))
    bare = TokenLayout()
    assert joined([bare, bare], x.split([5, 7], 1)) == bare


@pytest.mark.parametrize(("name", "layers"), [("llama", "all"), ("llama", HYBRID), ("gpt2", "all")])
def test_softmax_cannot_go_on_from_states(zoo: Zoo, name: str, layers: str) -> None:
    """Neither the teacher nor the source model: both would see the new tokens alone."""
    model, ids = zoo.model(name, layers), tokens(2, 9)
    cache = model(ids, use_cache=True).past_key_values
    with pytest.raises(ValueError, match=r"states of linear layers.*DynamicCache"), model.teacher():
        model(ids[:, :1], past_key_values=cache)
    cache = model(ids, use_cache=True).past_key_values
    with pytest.raises(ValueError, match="states of linear layers"):
        small_model(name)(ids[:, :1], past_key_values=cache)
    with model.teacher():  # with a cache of its own it goes on as the source does
        expected = small_model(name)(torch.cat([ids, ids[:, :1]], 1)).logits[:, -1:]
        cache = model(ids, use_cache=True).past_key_values
        assert relative_error(model(ids[:, :1], past_key_values=cache).logits, expected) < EXACT


@pytest.mark.parametrize("options", [{}, {"window": 4}], ids=str)
@pytest.mark.parametrize(("held", "given"), [(1, 3), (3, 1), (2, 4)])
def test_a_cache_of_other_rows_is_refused(zoo: Zoo, held: int, given: int, options: dict[str, int]) -> None:
    model = zoo.model("llama", "all", **options)
    cache = model(tokens(held, 9), use_cache=True).past_key_values
    with pytest.raises(ValueError, match=rf"holds {held} sequences and the input has {given}.*batch_repeat_interleave"):
        model(tokens(given, 1), past_key_values=cache)


@pytest.mark.parametrize(
    ("options", "others"),
    [({}, {"damping": 4.0}), ({}, {"window": 4}), ({"window": 4}, {}), ({}, {"slots": 16})],
    ids=str,
)
def test_a_cache_of_other_options_is_refused(zoo: Zoo, options: dict[str, Any], others: dict[str, Any]) -> None:
    """Some have states of the same shapes, which would be taken for one's own."""
    cache = zoo.model("llama", "all", **others)(tokens(2, 9), use_cache=True).past_key_values
    with pytest.raises(ValueError, match=r"holds the state of gsa\(.*this layer is gsa\(.*DynamicCache\(\) of its own"):
        zoo.model("llama", "all", **options)(tokens(2, 1), past_key_values=cache)


def test_cache_batches_are_repeated_selected_and_reset(zoo: Zoo) -> None:
    model, ids = zoo.model("llama", HYBRID), tokens(2, 9)
    cache = model(ids, use_cache=True).past_key_values
    cache.batch_repeat_interleave(3)
    cache.batch_select_indices(torch.tensor([0, 5]))
    assert relative_error(steps(model, tokens(2, 3, seed=9), cache=cache), whole_after(model, ids)) < EXACT
    state = next(layer for layer in cache.layers if isinstance(layer, type(cache.layers[0])))
    cache.reset()
    assert state.state is None
    assert cache.get_seq_length() == 0


def whole_after(model: Any, ids: Tensor) -> Tensor:
    """Logits of three more tokens after `ids`, in one pass."""
    return logits(model, torch.cat([ids, tokens(2, 3, seed=9)], 1))[:, ids.shape[1] :]


# ---------------------------------------------------------------- attention maps, backends


@pytest.mark.parametrize("layers", ["all", HYBRID])
def test_attention_maps_are_refused_by_name(zoo: Zoo, layers: str) -> None:
    model, ids = zoo.model("llama", layers), tokens(1, 6)
    with pytest.raises(ValueError, match=r"set_attn_implementation.'eager'., then ask under .with model.teacher"):
        model(ids, output_attentions=True)
    model.set_attn_implementation("eager")  # as it says
    for ask in (model, model.model):
        with pytest.raises(ValueError, match="output_attentions=True"):
            ask(ids, output_attentions=True)
    with pytest.raises(ValueError, match="output_attentions=True"):
        generate(model, ids, output_attentions=True)
    with model.teacher(), torch.no_grad():
        assert model(ids, output_attentions=True).attentions[0].shape == (1, 4, 6, 6)
    with pytest.raises(ValueError, match="output_attentions"):
        model.config.output_attentions = True
    asked = load(zoo.folders("llama", layers)[1], output_attentions=True)
    with pytest.raises(ValueError, match="output_attentions=True"):
        asked(ids)


@pytest.mark.parametrize("backend", ["sdpa", "eager"])
@pytest.mark.parametrize(("name", "layers"), [("llama", "all"), ("llama", HYBRID), ("gpt2", HYBRID)])
def test_a_backend_serves_the_layers_that_keep_softmax(zoo: Zoo, name: str, layers: str, backend: str) -> None:
    folder, ids = zoo.folders(name, layers)[1], tokens(2, 12)
    model = load(folder, attn_implementation=backend)
    later = load(folder)
    later.set_attn_implementation(backend)
    names = {model.config._attn_implementation, later.config._attn_implementation}
    assert names == {("linearize_all_" if layers == "all" else "linearize_") + backend}
    assert torch.equal(logits(model, ids), logits(later, ids))
    with later.teacher():
        assert later.config._attn_implementation == backend
        softmax = logits(later, ids)
    assert relative_error(logits(model, ids), softmax) > 1e-2
    source = small_model(name)
    source.set_attn_implementation(backend)
    assert torch.equal(softmax, logits(source, ids))


@pytest.mark.parametrize("backend", ["sdpa", "eager"])
@pytest.mark.parametrize(("name", "layers"), [("llama", "all"), ("mistral", HYBRID), ("gpt2", "all")])
def test_a_name_written_into_the_config_keeps_the_mixers(zoo: Zoo, name: str, layers: str, backend: str) -> None:
    model, ids = zoo.model(name, layers), tokens(2, 12)
    mask = torch.ones_like(ids)
    mask[1, 9:] = 0
    given = {"attention_mask": mask, "position_ids": places(mask)}
    expected = logits(model, ids, **given)[mask.bool()]
    model.config._attn_implementation = backend
    assert relative_error(logits(model, ids, **given)[mask.bool()], expected) < EXACT
    assert model.config._attn_implementation.startswith("linearize_")
    with model.teacher():
        assert model.config._attn_implementation == backend
        assert relative_error(logits(model, ids), logits(small_model(name), ids)) < EXACT


def test_an_unknown_backend_is_refused(zoo: Zoo) -> None:
    with pytest.raises(ValueError, match="nonsense"):
        zoo.model("llama").set_attn_implementation("nonsense")


def test_flash_attention_sees_its_own_name(zoo: Zoo, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []

    def flash(module: Any, *args: Any, **kwargs: Any) -> Any:
        seen.append(module.config._attn_implementation)
        return ALL_ATTENTION_FUNCTIONS["sdpa"](module, *args, **kwargs)

    model, ids = zoo.model("llama", HYBRID), tokens(2, 12)
    expected = logits(model, ids)
    AttentionInterface.register("flash_stand_in", flash)
    AttentionMaskInterface.register("flash_stand_in", ALL_MASK_ATTENTION_FUNCTIONS["sdpa"])
    register_backend("flash_stand_in")
    model.config._attn_implementation_internal = "linearize_flash_stand_in"
    assert torch.equal(logits(model, ids), expected)
    assert seen == ["flash_stand_in", "flash_stand_in"]
    assert model.config._attn_implementation == "linearize_flash_stand_in"


# ---------------------------------------------------------------- training-time machinery


@every_model
def test_gradient_checkpointing_changes_nothing(zoo: Zoo, name: str, layers: str) -> None:
    grads = []
    for checkpointing in (False, True):
        model, ids = zoo.model(name, layers), tokens(2, 18)
        mask = torch.ones_like(ids)
        mask[1, 12:] = 0
        if checkpointing:
            model.gradient_checkpointing_enable()
        model.train()
        torch.manual_seed(1)
        model(ids, attention_mask=mask, labels=ids, use_cache=False).loss.backward()
        grads.append({key: p.grad for key, p in model.named_parameters()})
    assert all(torch.equal(grads[0][key], grads[1][key]) for key in grads[0])


@pytest.mark.slow
def test_it_compiles_without_a_break(tmp_path: Path) -> None:
    """Two layers and four tokens: tracing takes seconds per layer."""
    torch._dynamo.reset()
    source = save_source(tmp_path / "source", num_hidden_layers=2)
    ids, mask = tokens(2, 4), torch.tensor([[1, 1, 1, 1], [0, 0, 1, 1]])
    hybrid = load(convert_folder(source, tmp_path / "hybrid", "0"))
    compiled = torch.compile(hybrid, backend="aot_eager", fullgraph=True)
    out = compiled(input_ids=ids, attention_mask=mask, use_cache=False).logits
    assert relative_error(out.detach(), logits(hybrid, ids, attention_mask=mask)) < EXACT
    out.square().mean().backward()
    assert all(p.grad is not None for mixer in mixers_of(hybrid).values() for p in mixer.parameters())
    with hybrid.teacher():
        expected = logits(small_model("llama", num_hidden_layers=2), ids)
        assert relative_error(logits(compiled, ids), expected) < EXACT
    assert relative_error(logits(compiled, ids), logits(hybrid, ids)) < EXACT
    linear = load(convert_folder(source, tmp_path / "linear"))
    compiled = torch.compile(linear, backend="aot_eager", fullgraph=True)
    for _ in range(2):  # the first graph is the teacher's, and then each has its own
        with linear.teacher():
            assert relative_error(logits(compiled, ids), expected) < EXACT
        assert relative_error(logits(compiled, ids), logits(linear, ids)) < EXACT


def test_threads_keep_apart(zoo: Zoo) -> None:
    model, ids, other = zoo.model("llama", HYBRID), tokens(2, 12), tokens(1, 5, seed=9)
    expected, inside, go_on = logits(model, ids), threading.Event(), threading.Event()

    def pause(module: Any, args: Any) -> None:
        if threading.current_thread() is not threading.main_thread():
            inside.set()
            assert go_on.wait(60)

    model.model.layers[2].self_attn.q_proj.register_forward_pre_hook(pause)
    with ThreadPoolExecutor(1) as pool:
        slow = pool.submit(logits, model, ids)
        assert inside.wait(60)  # the hooks of layer 2 have handed over, its mixer has not run
        alone = logits(model, other)
        go_on.set()
        assert torch.equal(slow.result(), expected)
    assert torch.equal(alone, logits(model, other))


@pytest.mark.parametrize("layers", ["all", HYBRID])
def test_no_thread_runs_a_model_that_another_has_switched(zoo: Zoo, layers: str) -> None:
    model, ids = zoo.model("llama", layers), tokens(2, 12)
    expected, source = logits(model, ids), logits(small_model("llama"), ids)

    def as_teacher() -> Tensor:
        with model.teacher():
            return logits(model, ids)

    with ThreadPoolExecutor(1) as pool:
        with model.teacher():
            for other in (lambda: logits(model, ids), as_teacher):
                with pytest.raises(RuntimeError, match=r"another thread is inside teacher\(\)"):
                    pool.submit(other).result()
            with model.teacher():  # one inside the other
                assert torch.equal(logits(model, ids), source)
            assert torch.equal(logits(model, ids), source)
        assert torch.equal(pool.submit(logits, model, ids).result(), expected)
        assert torch.equal(pool.submit(as_teacher).result(), source)


def test_a_pass_that_another_thread_would_switch_half_way_ends(zoo: Zoo) -> None:
    model, ids = zoo.model("gpt2"), tokens(2, 12)
    expected, inside, go_on = logits(model, ids), threading.Event(), threading.Event()

    def pause(module: Any, args: Any) -> None:
        if threading.current_thread() is not threading.main_thread():
            inside.set()
            assert go_on.wait(60)

    handle = model.transformer.h[2].ln_1.register_forward_pre_hook(pause)
    with ThreadPoolExecutor(1) as pool:
        slow = pool.submit(logits, model, ids)
        assert inside.wait(60)
        with model.teacher():
            go_on.set()
            with pytest.raises(RuntimeError, match=r"another thread is inside teacher\(\)"):
                slow.result()
    handle.remove()
    assert torch.equal(logits(model, ids), expected)


def test_autograd_may_compute_layers_of_a_teacher_again_in_another_thread(zoo: Zoo) -> None:
    """As it does on a GPU."""
    found = []
    for checkpointing in (False, True):
        model, ids = zoo.model("llama", HYBRID), tokens(2, 12)
        model.gradient_checkpointing_enable({"use_reentrant": False})
        with model.teacher(), ThreadPoolExecutor(1) as pool:
            for layer in model.model.layers:
                layer.train(checkpointing)  # else transformers checkpoints nothing
            loss = model(ids, labels=ids, use_cache=False).loss
            pool.submit(loss.backward).result()
        found.append({name: p.grad for name, p in model.named_parameters() if p.grad is not None})
    assert found[0].keys() == found[1].keys()
    assert all(torch.equal(found[0][name], found[1][name]) for name in found[0])


@pytest.mark.parametrize("way", ["deepcopy", "pickle"])
def test_copies_are_complete_and_apart(zoo: Zoo, way: str) -> None:
    model, ids = zoo.model("llama", HYBRID, rope=False), tokens(2, 12)
    expected = logits(model, ids)

    def interrupt(module: Any, args: Any) -> None:
        raise KeyboardInterrupt

    handle = model.model.layers[0].self_attn.o_proj.register_forward_pre_hook(interrupt)
    with pytest.raises(KeyboardInterrupt):
        model(ids)  # leaves a call unfinished, with hidden states that have a graph
    handle.remove()
    twin = copy.deepcopy(model) if way == "deepcopy" else pickle.loads(pickle.dumps(model))
    assert torch.equal(logits(twin, ids), expected)
    for mixer in mixers_of(model).values():
        mixer.forget.bias.data.zero_()
    assert torch.equal(logits(twin, ids), expected)
    with twin.teacher():
        assert relative_error(logits(twin, ids), expected) > 1e-2
        assert torch.equal(logits(twin, ids), logits(small_model("llama"), ids))


@pytest.mark.parametrize("name", ["llama", "gemma2", "phi3"])
def test_without_rotary_embedding_positions_do_not_matter(zoo: Zoo, name: str) -> None:
    ids = tokens(2, 12)
    shifted, near = torch.arange(12)[None] + 50, torch.arange(12)[None]
    for rope in (True, False):
        model = zoo.model(name, rope=rope)
        difference = relative_error(logits(model, ids, position_ids=shifted), logits(model, ids, position_ids=near))
        stretched = relative_error(
            logits(model, ids, position_ids=shifted, attention_mask=torch.ones_like(ids)),
            logits(model, ids, position_ids=near * 3, attention_mask=torch.ones_like(ids)),
        )
        assert (difference == 0.0 and stretched == 0.0) != rope
        assert relative_error(steps(model, ids, 5), logits(model, ids)) < EXACT
        with model.teacher():
            assert torch.equal(logits(model, ids), logits(small_model(name), ids))


def test_the_teacher_has_no_dropout_and_gives_the_mode_back(zoo: Zoo) -> None:
    model, ids = zoo.model("gpt2", HYBRID), tokens(2, 12)
    model.train()
    model.transformer.h[2].eval()
    before = [module.training for module in model.modules()]
    assert relative_error(logits(model, ids), logits(model, ids)) > 0
    with model.teacher():
        assert torch.equal(logits(model, ids), logits(small_model("gpt2"), ids))
    assert [module.training for module in model.modules()] == before


def test_the_state_layer_answers_as_transformers_asks() -> None:
    layer = StateLayer()
    assert (layer.get_seq_length(), layer.get_max_length(), layer.get_max_cache_shape()) == (0, -1, -1)
    key = torch.zeros(2, 2, 5, 8)
    layer.awaited = True
    assert layer.update(key, key)[0] is key
    assert layer.get_mask_sizes(3) == (8, 0)
    assert layer.get_seq_length() == 5
