"""Masks that callers make themselves, and positions that they leave out: followed, or refused, never half heard."""

from __future__ import annotations

import copy
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from architectures import shrunk
from architectures import small_model as any_model
from conftest import TOLERANCE, relative_error
from models import HYBRID, Zoo, convert_folder, load, logits, save_source, small_model, tokens
from torch import Tensor
from transformers import AutoModel, BertConfig, BertModel, Qwen2VLConfig, Qwen2VLForConditionalGeneration
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from linearize.convert import convert, plan_conversion
from linearize_kernels import layout
from linearize_kernels.hf.attention_hooks import renamed
from linearize_kernels.hf.interface import documents_apart
from linearize_kernels.layout import read_mask

EXACT = TOLERANCE[torch.float32]
LENGTHS = (5, 1, 6)
# By mechanism, what keeps its small instance small.
MECHANISMS: dict[str, dict[str, Any]] = {
    "gsa": {"slots": 8, "window": 3},
    "gla": {},
    "gdn": {},
    "retnet": {},
    "mamba2": {},
    "la": {},
    "mhla": {},
    "sla": {},
}
every_mechanism = pytest.mark.parametrize("mechanism", MECHANISMS)


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_source(tmp_path_factory.mktemp("masks") / "source")


def linear(source: Path, folder: Path, mechanism: str, layers: str = "all") -> Any:
    """The source, converted to a mechanism."""
    plan = plan_conversion(str(source), mechanism, layers=layers, options=MECHANISMS[mechanism])
    convert(*plan, folder / "linear", level="none", say=lambda text: None)
    return load(folder / "linear")


def documents(lengths: tuple[int, ...], causal: bool = True) -> Tensor:
    """A mask [1,1,T,T] that keeps documents of these lengths apart."""
    number = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    mask = number[:, None] == number
    return (mask.tril() if causal else mask)[None, None]


def added(mask: Tensor) -> Tensor:
    """The same as numbers that are added to scores."""
    return torch.zeros(mask.shape).masked_fill(~mask, torch.finfo(torch.float32).min)


def prefix(T: int, length: int) -> Tensor:
    """Causal but for the first `length` tokens, which see each other in both directions."""
    mask = torch.ones(T, T, dtype=torch.bool).tril()
    mask[:length, :length] = True
    return mask[None, None]


def apart(model: Any, ids: Tensor, lengths: tuple[int, ...]) -> Tensor:
    """Logits of the documents one by one."""
    return torch.cat([logits(model, part) for part in ids.split(lengths, 1)], 1)


# ---------------------------------------------------------------- documents and padding


@every_mechanism
def test_a_mask_of_documents_keeps_them_apart(source: Path, tmp_path: Path, mechanism: str) -> None:
    model, ids = linear(source, tmp_path, mechanism), tokens(2, sum(LENGTHS))
    expected = apart(model, ids, LENGTHS)
    assert relative_error(logits(model, ids), expected) > 1e-2
    for mask in (documents(LENGTHS), added(documents(LENGTHS)), documents(LENGTHS).expand(2, 4, -1, -1)):
        assert relative_error(logits(model, ids, attention_mask=mask), expected) < EXACT


@pytest.mark.parametrize(("name", "layers"), [("llama", HYBRID), ("gpt2", "all"), ("qwen3", "1,3"), ("phi3", "all")])
def test_rows_may_have_other_documents_and_padding(zoo: Zoo, name: str, layers: str) -> None:
    model, ids = zoo.model(name, layers), tokens(2, 12)
    mask = torch.cat([documents((12,)), documents((5, 7))])
    mask[0, :, :, :3] = False  # left padding, which sees nothing
    mask[1, :, 10:] = mask[1, :, :, 10:] = False
    places = torch.stack([(torch.arange(12) - 3).clamp(min=0), torch.tensor([*range(5), *range(7)])])
    out = logits(model, ids, attention_mask=mask, position_ids=places)
    assert relative_error(out[0, 3:], logits(model, ids[:1, 3:])[0]) < EXACT
    assert relative_error(out[1, :5], logits(model, ids[1:, :5])[0]) < EXACT
    assert relative_error(out[1, 5:10], logits(model, ids[1:, 5:10])[0]) < EXACT


@pytest.mark.parametrize("layers", ["0,2", "1,3", "all"])
def test_masks_by_the_kind_of_layer(zoo: Zoo, layers: str) -> None:
    """Gemma 2 takes one for its full layers and one for its sliding ones, whose window is 6."""
    model, ids = zoo.model("gemma2", layers), tokens(1, 15)
    full, places = documents((9, 6)), torch.tensor([[*range(9), *range(6)]])
    near = full & (torch.arange(15)[:, None] - torch.arange(15) < 6)
    masks = {"full_attention": added(full), "sliding_attention": added(near)}  # its eager softmax adds them
    out = logits(model, ids, attention_mask=masks, position_ids=places)
    assert relative_error(out, apart(model, ids, (9, 6))) < EXACT
    masks["sliding_attention"] = added(near & near.roll(2, -1))
    if layers != "1,3":  # its linear layers are sliding ones
        with pytest.raises(ValueError, match=r"documents.*padding"):
            logits(model, ids, attention_mask=masks)


@every_mechanism
def test_a_cache_goes_on_in_the_last_document(source: Path, tmp_path: Path, mechanism: str) -> None:
    model, ids = linear(source, tmp_path, mechanism), tokens(2, 12)
    mask = documents((5, 7))
    cache, out = None, []
    for start, end in ((0, 8), (8, 9), (9, 12)):
        part = mask[:, :, start:end, :end]
        with torch.no_grad():
            found = model(ids[:, start:end], attention_mask=part, past_key_values=cache, use_cache=True)
        cache = found.past_key_values
        out.append(found.logits)
    assert relative_error(torch.cat(out, 1), apart(model, ids, (5, 7))) < EXACT
    mask = documents((12, 3))[:, :, 12:]
    with pytest.raises(ValueError, match="neither of documents"), torch.no_grad():  # the state holds what it hides
        model(tokens(2, 3), attention_mask=mask, past_key_values=cache)


@pytest.mark.parametrize("name", ["gptj", "bloom"])
def test_attention_with_softmax_of_its_own_follows_them(tmp_path: Path, name: str) -> None:
    any_model(name).save_pretrained(tmp_path / "source")
    drop = ["alibi"] if name == "bloom" else []
    model = load(convert_folder(tmp_path / "source", tmp_path / "linear", allow_drop=drop))
    ids, mask = tokens(1, 12), documents((5, 7))
    places = {"position_ids": torch.tensor([[*range(5), *range(7)]])} if name == "gptj" else {}
    try:
        with model.teacher():
            logits(model, ids, attention_mask=mask, **places)
    except Exception:
        pytest.skip(f"{name} takes no 4D mask")
    assert relative_error(logits(model, ids, attention_mask=mask, **places), apart(model, ids, (5, 7))) < EXACT
    with pytest.raises(ValueError, match=r"tokens.*later"):
        logits(model, ids, attention_mask=prefix(12, 4), **places)


def encoder(folder: Path) -> Any:
    """A small BERT, converted to linear attention."""
    sizes: dict[str, Any] = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 97}
    torch.manual_seed(3)
    config = BertConfig(**sizes, intermediate_size=48, initializer_range=0.3, max_position_embeddings=64)
    BertModel(config).eval().save_pretrained(folder / "source")
    plan = plan_conversion(str(folder / "source"), "la")
    convert(*plan, folder / "linear", level="none", say=lambda text: None)
    return AutoModel.from_pretrained(folder / "linear", trust_remote_code=True).eval()


def test_documents_of_an_encoder(tmp_path: Path) -> None:
    model = encoder(tmp_path)
    ids, places = tokens(2, 12), torch.tensor([[*range(5), *range(7)]])
    with torch.no_grad():
        expected = torch.cat([model(part).last_hidden_state for part in ids.split((5, 7), 1)], 1)
        mask = documents((5, 7), causal=False).expand(2, -1, -1, -1)
        out = model(ids, attention_mask=mask, position_ids=places).last_hidden_state
        assert relative_error(out, expected) < EXACT
        with pytest.raises(ValueError, match=r"documents.*padding"):
            model(ids, attention_mask=documents((12,)).expand(2, -1, -1, -1))


# ---------------------------------------------------------------- what only softmax can follow

WRONG = {
    "prefix": (prefix(12, 4), "lets tokens see later ones"),
    "bidirectional": (torch.ones(1, 1, 12, 12, dtype=torch.bool), "lets tokens see later ones"),
    "one row": (torch.ones(1, 1, 1, 12, dtype=torch.bool).expand(1, 1, 12, 12), "lets tokens see later ones"),
    "window": (documents((12,)) & ~documents((12,)).tril(-4), "neither of documents"),
    "stride": (documents((12,)) & (torch.eye(12, dtype=torch.bool) | (torch.arange(12) % 3 == 0)), "neither of doc"),
    "heads": (torch.cat([documents((12,))] * 3 + [documents((5, 7))], 1), "neither of documents"),
    "bias": (added(documents((12,))) - 0.5 * torch.arange(12.0), "neither of documents"),
    "columns": (torch.ones(1, 1, 12, 9, dtype=torch.bool), "9 columns for 12 new tokens"),
}


@pytest.mark.parametrize("case", WRONG)
@pytest.mark.parametrize("layers", ["all", HYBRID])
def test_what_only_softmax_can_follow_is_refused(zoo: Zoo, layers: str, case: str) -> None:
    mask, message = WRONG[case]
    with pytest.raises(ValueError, match=message):
        logits(zoo.model("llama", layers), tokens(2, 12), attention_mask=mask)


def test_the_teacher_follows_any(zoo: Zoo) -> None:
    model, ids = zoo.model("llama"), tokens(1, 12)
    with model.teacher():
        both = logits(model, ids, attention_mask=prefix(12, 4))
        assert relative_error(both, logits(model, ids)) > 1e-2


def test_masks_of_transformers_are_not_read_again(zoo: Zoo, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are T x T, and known; reading them would take longer than many a layer."""
    model, ids = zoo.model("gemma2", HYBRID), tokens(2, 12)
    monkeypatch.setattr(layout, "read_mask", lambda *_: pytest.fail("read"))
    monkeypatch.setitem(carried(model, "layout"), "read_mask", lambda *_: pytest.fail("read"))
    mask = torch.ones_like(ids)
    mask[0, :3] = 0
    logits(model, ids, attention_mask=mask)
    model.generate(ids, attention_mask=mask, max_new_tokens=3, min_new_tokens=3, do_sample=False)
    with pytest.raises(pytest.fail.Exception):
        logits(model, ids, attention_mask={"full_attention": documents((12,)), "sliding_attention": documents((12,))})


@pytest.mark.parametrize("tagged", [True, False])
def test_opened_rows_of_padding_are_padding(zoo: Zoo, monkeypatch: pytest.MonkeyPatch, tagged: bool) -> None:
    """Some packages let the rows of left padding, which see nothing, see everything; one that compiles the function
    takes away what says how the mask was asked for."""
    plain = ALL_MASK_ATTENTION_FUNCTIONS["sdpa"]

    def opened(*args: Any, **kwargs: Any) -> Any:
        mask = plain(*args, **kwargs)
        return None if mask is None else mask | ~mask.any(-1, keepdim=True)

    monkeypatch.setitem(ALL_MASK_ATTENTION_FUNCTIONS._global_mapping, "sdpa", opened)
    monkeypatch.setattr(sys.modules["linearize_kernels.hf.interface"], "is_traced", lambda mask: not tagged)
    model, ids = zoo.model("llama", HYBRID), tokens(2, 12)
    monkeypatch.setitem(carried(model, "interface"), "is_traced", lambda mask: not tagged)
    mask = torch.ones_like(ids)
    mask[0, :4] = 0
    for cache in (False, True):
        with torch.no_grad():
            both = model(input_ids=ids, attention_mask=mask, use_cache=cache).logits
        for row, start in ((0, 4), (1, 0)):
            assert relative_error(both[row, start:], logits(model, ids[row : row + 1, start:])[0]) < EXACT
    written = model.generate(ids, attention_mask=mask, max_new_tokens=4, min_new_tokens=4, do_sample=False)
    alone = model.generate(ids[:1, 4:], max_new_tokens=4, min_new_tokens=4, do_sample=False)
    assert torch.equal(written[0, 12:], alone[0, 8:])


def carried(model: Any, name: str) -> dict[str, Any]:
    """The names of a file, such as layout.py, that came with a checkpoint."""
    return vars(sys.modules[f"{type(model).__module__.rpartition('.')[0]}.{name}"])


@pytest.mark.slow
def test_compiled_graphs_follow_and_refuse(tmp_path: Path) -> None:
    torch._dynamo.reset()
    source = save_source(tmp_path / "source", num_hidden_layers=2)
    model, ids = load(convert_folder(source, tmp_path / "linear", "0")), tokens(1, 6)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    given = {"attention_mask": documents((2, 4)), "position_ids": torch.tensor([[0, 1, 0, 1, 2, 3]])}
    assert relative_error(logits(compiled, ids, **given), logits(model, ids, **given)) < EXACT
    with pytest.raises(RuntimeError, match="Linear layers follow"):
        logits(compiled, ids, **{**given, "attention_mask": prefix(6, 3)})


def test_a_mask_is_read_as_what_it_says() -> None:
    assert read_mask(documents((4,)), (2, 4), True, 0, None) == (None, None)
    padding, segments = read_mask(documents((2, 3)), (1, 5), True, 0, None)
    assert padding is None
    assert segments is not None
    assert segments.tolist() == [[0, 0, 1, 1, 1]]
    both = documents((2, 3), causal=False)
    both[..., 4, :] = both[..., 4] = False
    padding, segments = read_mask(added(both), (1, 5), False, 0, None)
    assert padding is not None
    assert segments is not None
    assert padding.tolist() == [[True, True, True, True, False]]
    assert segments[0, :4].tolist() == [0, 0, 1, 1]


@pytest.mark.parametrize("layers", ["all", HYBRID])
def test_any_number_but_zero_is_a_real_token(zoo: Zoo, layers: str) -> None:
    """As for softmax; some packers write 2 for the second document, and positions do not count it twice."""
    model, ids = zoo.model("llama", layers), tokens(2, 12)
    mask = torch.ones_like(ids)
    mask[1, :4] = 0
    plain = logits(model, ids, attention_mask=mask)
    mask[:, 6:] = 2
    for form in (mask, mask / 2):
        assert torch.equal(logits(model, ids, attention_mask=form), plain)


# ---------------------------------------------------------------- padding masks of another length


@pytest.mark.parametrize("columns", [1, 11, 13, 20])
@pytest.mark.parametrize("layers", ["all", HYBRID])
def test_a_padding_mask_has_a_column_for_each_token(zoo: Zoo, layers: str, columns: int) -> None:
    """Softmax reads the first columns, and linear layers would read the last ones."""
    model, ids = zoo.model("llama", layers), tokens(2, 12)
    for hidden in (0, 1):
        mask = torch.ones(2, columns, dtype=torch.long)
        mask[1, :hidden] = 0
        with pytest.raises(ValueError, match=rf"attention_mask.*\[2.*{columns}\].*12"):
            logits(model, ids, attention_mask=mask, position_ids=torch.arange(12)[None].expand(2, -1))


def test_a_padding_mask_of_an_encoder_has_one_too(tmp_path: Path) -> None:
    model = encoder(tmp_path)
    mask = torch.ones(2, 9, dtype=torch.long)
    mask[0, 2:4] = 0
    for ids in (tokens(2, 7), tokens(2, 11)):
        with pytest.raises(ValueError, match=rf"9.*{ids.shape[1]}"), torch.no_grad():
            model(ids, attention_mask=mask)


def test_with_a_cache_a_padding_mask_has_columns_of_its_tokens_too(zoo: Zoo) -> None:
    model, ids = zoo.model("llama"), tokens(2, 12)
    mask = torch.ones_like(ids)
    mask[1, :3] = 0
    whole = logits(model, ids, attention_mask=mask)

    def last(columns: Tensor) -> Tensor:
        with torch.no_grad():
            cache = model(ids[:, :8], attention_mask=mask[:, :8], use_cache=True).past_key_values
            places = torch.stack([torch.arange(8, 12), torch.arange(5, 9)])
            return model(ids[:, 8:], attention_mask=columns, past_key_values=cache, position_ids=places).logits

    for columns in (mask, mask[:, 8:]):
        assert relative_error(last(columns), whole[:, 8:]) < EXACT
    for columns in (torch.cat([mask, mask[:, :1]], 1), mask[:, 9:]):
        with pytest.raises(ValueError, match=r"columns.*4.*8"):
            last(columns)


# ---------------------------------------------------------------- padding without positions


def padded(model: Any, ids: Tensor, mask: Tensor, prefill: int, **given: Any) -> Tensor:
    """Logits of a batch, a prefill and the rest token by token, without position_ids."""
    cache, found = None, []
    bounds = [0, *range(prefill, ids.shape[1] + 1)]
    for start, end in pairwise(bounds):
        with torch.no_grad():
            out = model(ids[:, start:end], attention_mask=mask[:, :end], past_key_values=cache, use_cache=True, **given)
        cache = out.past_key_values
        found.append(out.logits)
    return torch.cat(found, 1)


@every_mechanism
def test_left_padding_needs_no_positions(source: Path, tmp_path: Path, mechanism: str) -> None:
    model, ids = linear(source, tmp_path, mechanism), tokens(2, 20)
    mask = torch.ones_like(ids)
    mask[1, :7] = 0
    out = padded(model, ids, mask, 16)
    assert relative_error(out[1, 7:], logits(model, ids[1:, 7:])[0]) < EXACT
    assert relative_error(out[0], logits(model, ids[:1])[0]) < EXACT


@pytest.mark.parametrize("name", ["phi3", "mistral", "gemma2"])
def test_left_padding_needs_no_positions_in_hybrids(tmp_path: Path, name: str) -> None:
    model, ids = linear(save_source(tmp_path / "source", name), tmp_path, "gla", HYBRID), tokens(2, 20)
    for dtype in (torch.long, torch.bool, torch.float32):
        mask = torch.ones(2, 20, dtype=dtype)
        mask[1, :7] = 0
        out = padded(model, ids, mask, 17)
        assert relative_error(out[1, 7:], logits(model, ids[1:, 7:])[0]) < EXACT
    embeds = model.get_input_embeddings()(ids)
    with torch.no_grad():
        same = model(inputs_embeds=embeds, attention_mask=mask, use_cache=False).logits
    assert relative_error(same[1, 7:], logits(model, ids[1:, 7:])[0]) < EXACT


@pytest.mark.parametrize("name", ["gptj", "gemma3"])
def test_left_padding_where_others_rotate(tmp_path: Path, name: str) -> None:
    """GPT-J rotates in its attention; Gemma 3 is a model in a model, which gets 4D masks made for it."""
    any_model(name).save_pretrained(tmp_path / "source")
    model, ids = linear(tmp_path / "source", tmp_path, "gla"), tokens(2, 20)
    mask = torch.ones_like(ids)
    mask[1, :7] = 0
    assert relative_error(padded(model, ids, mask, 18)[1, 7:], logits(model, ids[1:, 7:])[0]) < EXACT


def test_the_teacher_places_tokens_as_the_source_does(zoo: Zoo) -> None:
    model, ids = zoo.model("llama"), tokens(2, 12)
    mask = torch.ones_like(ids)
    mask[1, :5] = 0
    with model.teacher():
        found = logits(model, ids, attention_mask=mask)
    assert torch.equal(found, logits(small_model("llama"), ids, attention_mask=mask))
    positions = torch.arange(12)[None].expand(2, -1)  # what is given stays
    plain = logits(model, ids, attention_mask=mask, position_ids=positions)
    assert relative_error(plain[0], logits(model, ids[:1])[0]) < EXACT


# ---------------------------------------------------------------- documents that are named, and not placed


def by_bounds(lengths: tuple[int, ...]) -> dict[str, Tensor]:
    """As DataCollatorWithFlattening(return_position_ids=False, return_flash_attn_kwargs=True) names documents."""
    bounds = torch.tensor([0, *lengths]).cumsum(0).int()
    return {"cu_seq_lens_q": bounds, "cu_seq_lens_k": bounds}


def by_numbers(lengths: tuple[int, ...]) -> dict[str, Tensor]:
    """As DataCollatorWithFlattening(return_position_ids=False, return_seq_idx=True) does."""
    numbers = torch.arange(len(lengths), dtype=torch.int32)
    return {"seq_idx": torch.repeat_interleave(numbers, torch.tensor(lengths))[None]}


@pytest.mark.parametrize("name", [by_bounds, by_numbers])
@every_mechanism
def test_named_documents_need_no_positions(source: Path, tmp_path: Path, mechanism: str, name: Any) -> None:
    model, ids = linear(source, tmp_path, mechanism), tokens(1, 33)
    expected = apart(model, ids, (13, 20))
    assert relative_error(logits(model, ids), expected) > 1e-2
    assert relative_error(logits(model, ids, **name((13, 20))), expected) < EXACT


@pytest.mark.parametrize("start", [13, 15, 17])
@every_mechanism
def test_named_documents_may_have_padding(source: Path, tmp_path: Path, mechanism: str, start: int) -> None:
    """Two tokens of padding before the first document, four between them, which either may hold, and two at the end."""
    model, ids = linear(source, tmp_path, mechanism), tokens(1, 37)
    mask = torch.ones_like(ids)
    mask[0, :2] = mask[0, 13:17] = mask[0, 35:] = 0
    out = logits(model, ids, attention_mask=mask, **by_bounds((start, 37 - start)))
    assert relative_error(out[:, 2:13], logits(model, ids[:, 2:13])) < EXACT
    assert relative_error(out[:, 17:35], logits(model, ids[:, 17:35])) < EXACT


@pytest.mark.parametrize("name", ["phi3", "mistral", "gemma2", "gpt2", "stablelm"])
def test_named_documents_in_hybrids(tmp_path: Path, name: str) -> None:
    """Layers that keep softmax keep them apart, too, also where transformers looks for no documents: beside a padding
    mask, and with a cache. GPT-2 adds learned positions to what it reads, and StableLM tells its attention nothing."""
    (any_model("stablelm") if name == "stablelm" else small_model(name)).save_pretrained(tmp_path / "source")
    model, ids = linear(tmp_path / "source", tmp_path, "gla", HYBRID), tokens(1, 33)
    mask, expected = torch.ones_like(ids), apart(model, ids, (13, 20))
    for told in (by_bounds((13, 20)), by_numbers((13, 20))):
        for more in ({}, {"attention_mask": mask}):
            assert relative_error(logits(model, ids, **told, **more), expected) < EXACT
        with torch.no_grad():
            assert relative_error(model(ids, use_cache=True, **told).logits, expected) < EXACT
    mask[0, :2] = mask[0, 11:15] = 0
    out, alone = logits(model, ids, attention_mask=mask, **by_bounds((13, 20))), mask[0].bool()
    parts = torch.cat([logits(model, ids[:, 2:11]), logits(model, ids[:, 15:])], 1)
    assert relative_error(out[:, alone], parts) < EXACT
    with torch.no_grad():
        cache = model(ids[:, :8], use_cache=True).past_key_values
        out = model(ids[:, 8:], past_key_values=cache, use_cache=True, **by_bounds((5, 25))).logits
    assert relative_error(out, expected[:, 8:]) < EXACT


def test_flash_attention_finds_documents_of_one_row() -> None:
    """By positions or bounds. A mask hides them from it, and so do several rows without the length of the longest."""
    q, bounds, backend = torch.zeros(2, 1, 20, 4), by_bounds((7, 13, 20)), "flash_attention_2"
    whole = bounds | {"max_length_q": 20}
    for rows, told in ((q[:1], by_numbers((7, 13))), (q, whole)):
        assert documents_apart(backend, torch.nn.Module(), (rows, rows, rows, None), told)[3] is None
    for mask, told in ((None, bounds), (torch.ones(2, 20), whole)):
        with pytest.raises(ValueError, match=r"flash_attention_2.*'sdpa'"):
            documents_apart(backend, torch.nn.Module(), (q, q, q, mask), told)


@pytest.mark.parametrize("name", ["falcon", "xglm"])
def test_softmax_of_its_own_is_told_no_documents(tmp_path: Path, name: str) -> None:
    """It sees documents in the mask that the architecture makes: Falcon's of position_ids, XGLM's not."""
    any_model(name).save_pretrained(tmp_path / "source")
    model, ids = linear(tmp_path / "source", tmp_path, "gla", "0"), tokens(1, 33)
    for told in (by_bounds((13, 20)), by_numbers((13, 20))):
        with pytest.raises(ValueError, match=r"position_ids.*use_cache=False"):
            model(ids, **told)
    if name == "falcon":
        places = torch.cat([torch.arange(13), torch.arange(20)])[None]
        assert relative_error(logits(model, ids, position_ids=places), apart(model, ids, (13, 20))) < EXACT


def test_bounds_count_through_all_rows(source: Path, tmp_path: Path) -> None:
    model, ids = linear(source, tmp_path, "gla"), tokens(2, 20)
    out = logits(model, ids, **by_bounds((7, 13, 20)))
    assert relative_error(out[:1], apart(model, ids[:1], (7, 13))) < EXACT
    assert relative_error(out[1:], logits(model, ids[1:])) < EXACT
    with pytest.raises(ValueError, match=r"40.*2.*20.*tokens.*20"):
        logits(model, ids, **by_bounds((7, 13)))
    with pytest.raises(ValueError, match=r"seq_idx.*\[1.*12\].*\[2,20\]"):
        logits(model, ids, **by_numbers((5, 7)))


def test_named_documents_go_on_from_a_cache(source: Path, tmp_path: Path) -> None:
    model, ids = linear(source, tmp_path, "gla"), tokens(1, 30)
    with torch.no_grad():
        cache = model(ids[:, :8], use_cache=True).past_key_values
        out = model(ids[:, 8:], past_key_values=cache, use_cache=True, **by_bounds((5, 17))).logits
    assert relative_error(out, apart(model, ids, (13, 17))[:, 8:]) < EXACT


@pytest.mark.parametrize("name", [by_bounds, by_numbers])
@every_mechanism
def test_a_cache_goes_on_in_the_last_of_named_documents(
    source: Path, tmp_path: Path, mechanism: str, name: Any
) -> None:
    """Its tokens are numbered from its beginning, also beside padding, and for rows that others took the place of."""
    model, ids = linear(source, tmp_path, mechanism), tokens(1, 40)
    expected = logits(model, ids[:, 13:])[:, 20:]
    for mask in (None, torch.ones_like(ids)):
        with torch.no_grad():
            first = {} if mask is None else {"attention_mask": mask[:, :33]}
            cache = model(ids[:, :33], use_cache=True, **name((13, 20)), **first).past_key_values
            cache.reorder_cache(torch.zeros(2, dtype=torch.long))
            both = ids.expand(2, -1)
            for start, end in ((33, 36), (36, 37), (37, 40)):
                second = {} if mask is None else {"attention_mask": mask[:, :end].expand(2, -1)}
                out = model(both[:, start:end], past_key_values=cache, **second).logits
                assert relative_error(out, expected[:, start - 33 : end - 33].expand_as(out)) < EXACT


def test_softmax_does_not_go_on_behind_several_documents(zoo: Zoo) -> None:
    """It would see them all. A mask of the caller's own may hide those before the last, and no others."""
    model, linear_model, ids, mask = zoo.model("llama", HYBRID), zoo.model("llama"), tokens(1, 15), documents((5, 10))
    for told in (by_bounds((5, 7)), by_numbers((5, 7)), {"attention_mask": mask[:, :, :12, :12]}):
        with torch.no_grad():
            cache = model(ids[:, :12], use_cache=True, **told).past_key_values
            with pytest.raises(ValueError, match=r"cache.*documents.*4D attention_mask"):
                model(ids[:, 12:], past_key_values=cache, position_ids=torch.tensor([[7, 8, 9]]))
    with pytest.raises(ValueError, match=r"cache.*documents"):
        model.generate(ids, max_new_tokens=3, **by_bounds((5, 10)))
    for one in (model, linear_model):
        with torch.no_grad():
            cache = one(ids[:, :12], use_cache=True, **by_bounds((5, 7))).past_key_values
            out = one(ids[:, 12:], past_key_values=copy.deepcopy(cache), attention_mask=mask[:, :, 12:]).logits
            assert relative_error(out, logits(one, ids[:, 5:])[:, 7:]) < EXACT
            with pytest.raises(ValueError, match=r"cache.*documents"):
                one(ids[:, 12:], past_key_values=cache, attention_mask=documents((15,))[:, :, 12:])
    one_document = logits(model, ids)
    with torch.no_grad():
        cache = model(ids[:, :12], use_cache=True, **by_bounds((12,))).past_key_values
        assert relative_error(model(ids[:, 12:], past_key_values=cache).logits, one_document[:, 12:]) < EXACT


def test_flash_attention_finds_documents_with_an_empty_cache(zoo: Zoo, monkeypatch: pytest.MonkeyPatch) -> None:
    """In positions that restart, in one row, as linear layers then do; transformers' other softmax does not."""
    flash = "flash_attention_2"
    monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS, flash, ALL_ATTENTION_FUNCTIONS["sdpa"])
    model, ids = zoo.model("llama"), tokens(1, 12)
    places = torch.tensor([[*range(5), *range(7)]])
    expected = apart(model, ids, (5, 7))
    with renamed(model, lambda name: "linearize_all_" + flash), torch.no_grad():
        out = model(ids, position_ids=places, use_cache=True)
        assert relative_error(out.logits, expected) < EXACT
        rows = model(ids.expand(2, -1), position_ids=places.expand(2, -1), use_cache=True).logits
        assert relative_error(rows[:1], expected) > 1e-2


def test_images_place_named_documents_themselves(tmp_path: Path) -> None:
    """Qwen2-VL numbers rows and columns of images, and knows of no documents."""
    sizes = shrunk(Qwen2VLConfig)
    sizes["text_config"]["rope_parameters"] = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 2]}
    torch.manual_seed(0)
    Qwen2VLForConditionalGeneration._from_config(Qwen2VLConfig(**sizes)).save_pretrained(tmp_path / "source")
    model, ids = linear(tmp_path / "source", tmp_path, "gla"), tokens(1, 33) % 90
    assert relative_error(logits(model, ids, **by_bounds((13, 20))), apart(model, ids, (13, 20))) < EXACT
    with pytest.raises(ValueError, match="position_ids"):
        logits(model, ids, pixel_values=torch.zeros(4, 12), **by_bounds((13, 20)))
