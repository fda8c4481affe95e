"""Attention that does not call transformers' interface: its softmax is found in its own code and replaced."""

from __future__ import annotations

import contextlib
import copy
import functools
import inspect
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import clean_env
import pytest
import torch
import transformers
from conftest import TOLERANCE, relative_error
from models import HYBRID, SMALL, Zoo, convert_folder, load, logits, source_with_mixers, tokens

from linearize_kernels.hf.attention_hooks import Call, mixers_of, student_call
from linearize_kernels.hf.capture import Capture
from linearize_kernels.layout import Geometry, this_thread

EXACT = TOLERANCE[torch.float32]
KEEP = ("vocab_size", "initializer_range", "bos_token_id", "eos_token_id", "pad_token_id")
COMMON = {key: SMALL[key] for key in KEEP}
FALCON = COMMON | {"hidden_size": 32, "num_hidden_layers": 4, "num_attention_heads": 4}
SMALL_GPT = COMMON | {"n_embd": 32, "n_layer": 4, "n_head": 4, "n_positions": 256, "rotary_dim": 4}
# Variant -> (config class, its values).
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "falcon multi-query": ("FalconConfig", FALCON),
    "falcon grouped": ("FalconConfig", FALCON | {"new_decoder_architecture": True, "num_kv_heads": 2}),
    "falcon alibi": ("FalconConfig", FALCON | {"multi_query": False, "bias": True, "alibi": True}),
    "bloom": ("BloomConfig", COMMON | {"hidden_size": 32, "n_layer": 4, "n_head": 4}),
    "mpt": (
        "MptConfig",
        COMMON | {"d_model": 32, "n_layers": 4, "n_heads": 4, "max_seq_len": 256, "attn_config": {"clip_qkv": 0.8}},
    ),
    "gptj": ("GPTJConfig", SMALL_GPT),
    "codegen": ("CodeGenConfig", SMALL_GPT),
    "gpt_neo": (
        "GPTNeoConfig",
        COMMON
        | {"hidden_size": 32, "num_layers": 4, "num_heads": 4, "attention_types": [[["global", "local"], 2]]}
        | {"window_size": 6, "max_position_embeddings": 256},
    ),
    # Compares the shape of its mask with that of its keys.
    "xglm": (
        "XGLMConfig",
        COMMON
        | {"d_model": 32, "ffn_dim": 48, "num_layers": 4, "attention_heads": 4, "init_std": 0.3}
        | dict.fromkeys(("dropout", "attention_dropout", "activation_dropout", "layerdrop"), 0.0),
    ),
}
# What some of them lose, by consent.
ALLOW = {"falcon alibi": ["alibi"], "bloom": ["alibi"], "mpt": ["position_bias"]}
each_variant = pytest.mark.parametrize("name", VARIANTS)


def original(name: str) -> Any:
    """The untouched random model of a variant."""
    kind, values = VARIANTS[name]
    with torch.random.fork_rng():
        torch.manual_seed(11)
        model = transformers.AutoModelForCausalLM.from_config(getattr(transformers, kind)(**values)).eval()
        for parameter in model.parameters():
            if parameter.ndim == 1:
                torch.nn.init.normal_(parameter.data, float(parameter.data.mean()), 0.1)
    return model


class Folders:
    """Source and converted folder of each variant, made once."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def __call__(self, name: str, layers: str = "all", **options: Any) -> tuple[Path, Path]:
        place = self.root / "-".join(map(str, [name, layers, *options.items()])).replace(" ", "_")
        if not place.exists():
            original(name).save_pretrained(place / "source")
            allowed = ALLOW.get(name, ())
            convert_folder(place / "source", place / "linear", layers, options=options, allow_drop=allowed)
        return place / "source", place / "linear"


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Folders:
    return Folders(tmp_path_factory.mktemp("adapters"))


def left_padded(length: int = 20) -> tuple[torch.Tensor, torch.Tensor]:
    """Two rows, five tokens of padding before the second."""
    mask = torch.ones(2, length, dtype=torch.long)
    mask[1, :5] = 0
    return tokens(2, length), mask


@each_variant
def test_the_result_is_the_source_with_mixers_in_the_chosen_layers(folders: Folders, name: str) -> None:
    """Of a hybrid, here and below: it has both kinds of layers."""
    source, folder = folders(name, HYBRID)
    model, native = load(folder), original(name)
    assert [m.site.layer for m in mixers_of(model).values()] == [0, 2]
    ids, mask = left_padded()
    softmax = logits(native, ids, attention_mask=mask)
    linear = logits(model, ids, attention_mask=mask)
    assert torch.isfinite(linear[mask.bool()]).all()
    assert relative_error(linear[mask.bool()], softmax[mask.bool()]) > 1e-2
    assert relative_error(linear, logits(source_with_mixers(source, folder), ids, attention_mask=mask)) < EXACT
    with model.teacher():
        assert torch.equal(logits(model, ids, attention_mask=mask), softmax)
    assert torch.equal(logits(model, ids, attention_mask=mask), linear)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "backend"), [("gptj", "aot_eager"), ("bloom", "eager")])
def test_it_compiles_around_the_captured_modules(folders: Folders, name: str, backend: str) -> None:
    """With breaks in the graph; gradients too, and the state of a cache."""
    model, (ids, mask) = load(folders(name, HYBRID)[1]), left_padded()
    torch._dynamo.reset()
    compiled = torch.compile(model, backend=backend)
    expected = logits(model, ids, attention_mask=mask)
    assert relative_error(logits(compiled, ids, attention_mask=mask), expected) < EXACT
    with torch.no_grad():
        cache = compiled(input_ids=ids[:1, :-1], use_cache=True).past_key_values
        last = compiled(input_ids=ids[:1, -1:], past_key_values=cache).logits
    assert relative_error(last, logits(model, ids[:1])[:, -1:]) < EXACT
    compiled(input_ids=ids, attention_mask=mask, use_cache=False).logits.square().mean().backward()
    assert all(p.grad is not None for mixer in mixers_of(model).values() for p in mixer.parameters())
    with model.teacher():
        softmax = logits(original(name), ids, attention_mask=mask)
        assert relative_error(logits(compiled, ids, attention_mask=mask), softmax) < EXACT


@each_variant
def test_padding_and_a_cache_change_nothing(folders: Folders, name: str) -> None:
    model = load(folders(name, HYBRID)[1])
    ids, mask = left_padded()
    places = {"position_ids": (mask.cumsum(-1) - 1).clamp_min(0)} if takes_positions(model) else {}
    whole = logits(model, ids, attention_mask=mask, **places)
    other = torch.cat([ids[:, :7] % 90 + 1, ids[:, 7:]], 1)
    assert relative_error(logits(model, other, attention_mask=mask, **places)[:, -1], whole[:, -1]) > 1e-3
    assert relative_error(whole[1, 5:], logits(model, ids[1:, 5:])[0]) < 10 * EXACT
    assert relative_error(whole[0], logits(model, ids[:1])[0]) < 10 * EXACT
    parts, cache = [], transformers.DynamicCache(config=model.config)
    for start, end in ((0, 9), (9, 14), *((t, t + 1) for t in range(14, 20))):
        extra = {key: value[:, start:end] for key, value in places.items()}
        with torch.no_grad():
            out = model(ids[:, start:end], attention_mask=mask[:, :end], past_key_values=cache, use_cache=True, **extra)
        parts.append(out.logits)
    assert relative_error(torch.cat(parts, 1)[mask.bool()], whole[mask.bool()]) < 10 * EXACT
    assert cache.get_seq_length() == 20


def takes_positions(model: Any) -> bool:
    return "position_ids" in inspect.signature(type(model).forward).parameters


@each_variant
def test_generation(folders: Folders, name: str) -> None:
    model = load(folders(name, HYBRID)[1])
    ids, mask = left_padded(12)
    ask: dict[str, Any] = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0}
    for beams in (1, 3):
        both = model.generate(ids, attention_mask=mask, num_beams=beams, **ask)
        assert torch.equal(both[1, 5:], model.generate(ids[1:, 5:], num_beams=beams, **ask)[0])
        assert torch.equal(both, model.generate(ids, attention_mask=mask, num_beams=beams, use_cache=False, **ask))


@each_variant
def test_gradients_reach_mixers_and_projections_with_and_without_checkpointing(folders: Folders, name: str) -> None:
    found = []
    for checkpointing in (False, True):
        model = load(folders(name, HYBRID)[1])
        if checkpointing:
            model.gradient_checkpointing_enable()
        model.train()
        without_dropout(model)
        model(tokens(2, 20), labels=tokens(2, 20)).loss.backward()
        found.append({key: parameter.grad for key, parameter in model.named_parameters()})
        for path in mixers_of(model):
            own = {key: grad for key, grad in found[-1].items() if key.startswith(path) and key.endswith("weight")}
            assert any(".mixer." in key for key in own)
            assert any(".mixer." not in key for key in own)
            for key, gradient in own.items():
                assert gradient is not None, key
                assert gradient.abs().max() > 0, key
    # Sums in another order: 1.07e-5 in GPT-Neo, 1.6e-7 with weights in float64.
    for key, gradient in found[0].items():
        assert relative_error(found[1][key], gradient) < 2 * EXACT, key


def without_dropout(model: torch.nn.Module) -> None:
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0


@pytest.mark.slow
def test_clean_processes_agree(folders: Folders, tmp_path: Path) -> None:
    for number, name in enumerate(VARIANTS):
        clean_env.lay_out(tmp_path / name, *folders(name, HYBRID if number % 2 else "all"))
    assert len(clean_env.in_clean_process(tmp_path)) == len(VARIANTS)


@each_variant
def test_attention_transfer_keeps_the_teachers_stream_and_trains_mixers(folders: Folders, name: str) -> None:
    model, native = load(folders(name)[1]), original(name)
    ids, mask = left_padded()
    for own_call in (False, True):
        model.zero_grad()
        listener = Listener(own_call)
        with model.transferring(listener), torch.no_grad():
            stream = model(ids, attention_mask=mask, use_cache=False).logits
        assert torch.equal(stream, logits(native, ids, attention_mask=mask))
        assert sorted(listener.heard) == [0, 1, 2, 3]
        for path, mixer in mixers_of(model).items():
            # What the mixer learns from is softmax's own answer: projected, it is what the module returned.
            y, taught = listener.outputs.get(mixer.site.layer, (None, None))
            assert (y is None) != own_call
            assert y is None or relative_error(y, taught) > 1e-2
            for key, parameter in mixer.named_parameters():
                assert parameter.grad is not None, f"{path} {key}"
                assert parameter.grad.abs().max() > 0, f"{path} {key}"


class Listener:
    """Trains on each layer as it is heard, before the output projection or after it."""

    def __init__(self, own_call: bool) -> None:
        self.own_call = own_call
        self.heard: list[int] = []
        self.outputs: dict[int, Any] = {}

    def on_layer(self, mixer: Any, inputs: Any, o: torch.Tensor, target: torch.Tensor, layout: Any) -> None:
        assert o.shape == target.shape == (*inputs[0].shape[:3], mixer.site.value_dim)
        self.heard.append(mixer.site.layer)
        if not self.own_call:
            (o - target).square().mean().backward()

    def student(self, module: Any) -> Any:
        return contextlib.nullcontext()

    def compare(self, mixer: Any, y: torch.Tensor, target: torch.Tensor) -> None:
        self.outputs[mixer.site.layer] = (y.detach(), target)
        (y - target).square().mean().backward()


@each_variant
def test_the_softmax_that_transfer_hears_is_the_architectures(folders: Folders, name: str) -> None:
    """With softmax itself in place of each mixer, the linear path computes the original's logits."""
    model, native, ids = load(folders(name)[1]), original(name), tokens(1, 18)
    targets: list[torch.Tensor] = []
    listener = Listener(own_call=False)
    listener.on_layer = lambda mixer, inputs, o, target, layout: targets.append(target)  # type: ignore[method-assign]
    with model.transferring(listener), torch.no_grad():
        model(ids, use_cache=False)
    for mixer, target in zip(mixers_of(model).values(), targets, strict=True):
        mixer.mix = lambda *_, target=target, **__: (target, None)  # type: ignore[method-assign]
    assert relative_error(logits(model, ids), logits(native, ids)) < EXACT


def remember_queries(model: Any) -> list[torch.Tensor]:
    """The queries that mixers get from now on."""
    queries: list[torch.Tensor] = []

    def mix(q: torch.Tensor, *rest: Any, mixer: Any) -> Any:
        queries.append(q)
        return type(mixer).mix(mixer, q, *rest)

    for mixer in mixers_of(model).values():
        mixer.mix = functools.partial(mix, mixer=mixer)  # type: ignore[method-assign]
    return queries


@pytest.mark.parametrize("name", ["falcon multi-query", "gptj", "codegen"])
def test_rotary_embedding_can_be_left_out(folders: Folders, name: str) -> None:
    """Then the layers see no positions, and only their own order of tokens is left."""
    model, ids = load(folders(name, rope=False)[1]), tokens(2, 12)
    found = []
    for start in (0, 5):
        queries = remember_queries(model)
        logits(model, ids, position_ids=torch.arange(start, start + 12)[None])
        found.append(torch.stack(queries))
    assert relative_error(found[1], found[0]) < EXACT
    for mixer in mixers_of(model).values():
        del mixer.mix
    with model.teacher():
        assert torch.equal(logits(model, ids), logits(original(name), ids))


@pytest.mark.parametrize("name", ["falcon multi-query", "gptj"])
def test_packed_documents_stay_apart(folders: Folders, name: str) -> None:
    model, ids, lengths = load(folders(name)[1]), tokens(1, 18), (7, 1, 10)
    places = torch.cat([torch.arange(n) for n in lengths])[None]
    together = logits(model, ids, position_ids=places)
    apart = torch.cat([logits(model, part) for part in ids.split(lengths, 1)], 1)
    assert relative_error(together, apart) < 10 * EXACT


def test_backends_maps_and_copies(folders: Folders) -> None:
    """The softmax backend is the user's, attention maps are refused, and a copy is a model of its own."""
    model, ids = load(folders("falcon multi-query", HYBRID)[1]), tokens(2, 12)
    expected = logits(model, ids)
    other = copy.deepcopy(model)
    other.set_attn_implementation("eager")
    assert relative_error(logits(other, ids), expected) < EXACT
    with other.teacher():
        assert relative_error(logits(other, ids), expected) > 1e-2
        assert torch.equal(logits(model, ids), expected)
        maps = other(ids, output_attentions=True, use_cache=False).attentions
        assert [part.shape for part in maps] == 4 * [(2, 4, 12, 12)]
    with pytest.raises(ValueError, match="no attention maps"):
        model(ids, output_attentions=True)


def test_the_code_travels_only_where_it_is_needed(folders: Folders, zoo: Zoo) -> None:
    assert (folders("bloom")[1] / "capture.py").is_file()
    assert not (zoo.folders("llama")[1] / "capture.py").exists()
    assert "capture" not in (zoo.folders("llama")[1] / "modeling_linearized.py").read_text()


def test_attention_of_another_form_is_refused() -> None:
    """XLNet adds two products of queries; nothing is replaced on a guess."""
    q, k = torch.randn(1, 2, 5, 4), torch.randn(1, 2, 4, 5)
    with Capture(lambda *_: pytest.fail("no softmax"), (1, 5)):
        with pytest.raises(NotImplementedError, match="another tensor"):
            torch.matmul(q, k) + torch.matmul(q, k)
        with pytest.raises(NotImplementedError, match="without a softmax"):
            torch.matmul(2 * torch.matmul(q, k), q)
        with pytest.raises(NotImplementedError, match="cat"):
            torch.cat([torch.matmul(q, k), torch.zeros(1, 2, 5, 1)], -1).sum()


@pytest.mark.parametrize("more", [None, (), (None,), (None, "cache")])
def test_a_module_may_return_its_output_alone_or_before_any_number_of_others(more: tuple[Any, ...] | None) -> None:
    """What attention transfer compares is [B,T,hidden], and not the first row of a bare tensor."""
    x, heard = torch.randn(2, 3, 4), []

    def forward(hidden_states: torch.Tensor) -> Any:
        return 2 * hidden_states if more is None else (2 * hidden_states, *more)

    transfer = SimpleNamespace(
        student=lambda module: contextlib.nullcontext(), compare=lambda mixer, y, target: heard.append((y, target))
    )
    mixer: Any = SimpleNamespace(
        arguments=("hidden_states",), drop_rope=False, reductions={}, transfer=transfer, calls={}
    )
    mixer.calls[this_thread()] = Call(x, None, {}, Geometry(None, False, None))
    student_call(SimpleNamespace(forward=forward), mixer, {"hidden_states": x}, forward(x))  # type: ignore[arg-type]
    ((y, target),) = heard
    assert torch.equal(y, 2 * x)
    assert torch.equal(target, 2 * x)
