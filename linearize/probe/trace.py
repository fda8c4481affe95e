"""Build a model on the meta device, run it once, and record every call of attention with heads, dims, scale and masks.

No weights are read and no architecture is known by name.
"""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import warnings
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AttentionInterface, DynamicCache, PreTrainedConfig, PreTrainedModel
from transformers.masking_utils import AttentionMaskInterface
from transformers.utils import logging as hf_logging

from linearize_kernels.hf.capture import OtherForm
from linearize_kernels.hf.interface import direction

from ..verify.child.inputs import make_inputs, takes, with_cache, writes_text
from .own_softmax import softmax_calls
from .token_grid import PatchTracer, looks_back

PROBE = "linearize_probe"
TOKENS = 8
# Keyword arguments of attention functions that every architecture passes or that mean nothing to a mixer.
ORDINARY = {"scaling", "dropout", "is_causal", "position_ids", "attention_mask", "use_cache", "output_attentions"}
ORDINARY |= {"output_hidden_states", "past_key_values", "cache_position", "position_embeddings", "head_mask"}
ORDINARY |= {"layer_idx", "logits_to_keep", "return_dict"}


def build_on_meta(
    config: PreTrainedConfig,
    model_class: type[PreTrainedModel],
    implementation: str | None = None,
    dtype: torch.dtype = torch.bfloat16,
) -> PreTrainedModel:
    """The model of `config` without memory behind its weights."""
    config = type(config).from_dict(config.to_dict())
    config._attn_implementation = implementation
    with quiet(), torch.device("meta"):
        # bfloat16, because grouped expert products know no other dtype on the meta device.
        return model_class._from_config(config, dtype=dtype).eval()


@dataclasses.dataclass
class Run:
    """One forward pass: a record for each call of attention, the paths that ran, what the architecture raised."""

    model: PreTrainedModel | None = None
    records: list[dict[str, Any]] = dataclasses.field(default_factory=list)
    ran: set[str] = dataclasses.field(default_factory=set)
    reads_masks: bool = False
    error: Exception | None = None
    follow: Any = None


def interface_calls(config: PreTrainedConfig, model_class: type[PreTrainedModel]) -> Run:
    """Run with the recording function in the attention interface.

    Architectures differ in the masks that they take. An explicit 4D one comes first: most pass it on as it is.
    """
    AttentionInterface.register(PROBE, _record)
    AttentionMaskInterface.register(PROBE, _full_mask)
    run = Run()
    errors: list[Exception] = []
    try:
        run.model = build_on_meta(config, model_class, PROBE)
        inputs = meta_inputs(run.model)
    except Exception as error:  # whatever the architecture raises, here and below
        return Run(error=error)
    _watch(run)
    square = _full_mask(len(inputs["input_ids"]), TOKENS, TOKENS) if [*inputs] == ["input_ids"] else None
    masks = (None,) if square is None else (square, torch.ones_like(inputs["input_ids"]), None)
    for mask in masks:
        run.records.clear()
        run.follow = PatchTracer(run.model, inputs)
        try:
            with quiet(), torch.no_grad(), ValuesAreZero(), run.follow:
                forward(run.model, inputs, mask)
            run.reads_masks = _reads_masks(run, inputs)
            return run
        except Exception as error:
            errors.append(error)
    return dataclasses.replace(run, error=errors[0])


def meta_inputs(model: PreTrainedModel) -> dict[str, Tensor]:
    """Inputs without memory; what says sizes keeps its values. Two rows, where attention in windows has more."""
    made = make_inputs(model, 1 if takes(model) == ["input_ids"] else 2, TOKENS)
    sizes = {"spatial_shapes"}
    dtypes = {name: model.dtype if value.is_floating_point() else value.dtype for name, value in made.items()}
    return {n: value if n in sizes else value.to("meta", dtypes[n]) for n, value in made.items()}


def forward(model: PreTrainedModel, inputs: dict[str, Tensor], mask: Tensor | None) -> None:
    """One pass without a cache."""
    cache = {"use_cache": False} if model.can_generate() else {}
    model(**inputs, **cache, **({} if mask is None else {"attention_mask": mask}))


def _reads_masks(run: Run, inputs: dict[str, Tensor]) -> bool:
    """Whether attention got another mask than the model made, or the model fails with the 2D mask of padding alone.

    It notes as well which records are of attention that says that it is not causal, where the model asks for causal
    masks alone: PaliGemma's, a decoder with prefixes.
    """
    plain = [record.pop("plain_mask") for record in run.records]
    if not all(plain) or [*inputs] != ["input_ids"]:
        return not all(plain)
    kinds = {type(record["module"]) for record in run.records}
    seen: set[type] = set()
    asked: set[str] = set()

    def flat_mask(*args: Any, **kwargs: Any) -> Any:
        asked.add(direction(kwargs.get("mask_function"), "allow_is_bidirectional_skip" in kwargs))
        return kwargs.get("attention_mask")

    def attend(module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any, **kwargs: Any) -> Any:
        if seen == kinds:  # a layer with each kind has had the mask
            raise StopTrace
        seen.add(type(module))
        return query.new_zeros(*query.shape[:-1], value.shape[-1]).transpose(1, 2), None

    AttentionInterface.register(PROBE, attend)
    AttentionMaskInterface.register(PROBE, flat_mask)
    flat = torch.ones(2, TOKENS, dtype=torch.long, device="meta")
    try:
        assert run.model is not None
        with quiet(), torch.no_grad(), ValuesAreZero():
            forward(run.model, {"input_ids": flat}, flat)
    except StopTrace:
        return False
    except Exception:  # whatever a wrong number of dimensions leads to
        return True
    finally:
        for record in run.records if asked == {"causal"} else ():
            record["denies"] |= not record["causal"]
    return False


class SlotCache(DynamicCache):
    """An empty cache that gives back keys and values whose number tells the slot: TOKENS + 1 for the first one."""

    def update(self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any) -> Any:
        length = TOKENS + 1 + layer_idx
        return tuple(x.new_empty(*x.shape[:-2], length, x.shape[-1]) for x in (key_states, value_states))


def slots_read(run: Run) -> dict[str, int]:
    """From which slot of the cache each attention module takes its keys and values, by path, in the order of calls.

    Nothing where the model has no such cache, or cannot run with this one.
    """
    model, lengths = run.model, dict[str, int]()
    if model is None or not writes_text(model):
        return {}

    def attend(module: Any, query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> Any:
        lengths[module._linearize_path] = key.shape[2]
        (B, H, T, _), Dv = query.shape, value.shape[-1]
        return query.new_zeros(B, T, H, Dv), None

    AttentionInterface.register(PROBE, attend)
    AttentionMaskInterface.register(PROBE, _full_mask)
    try:
        with quiet(), torch.no_grad(), ValuesAreZero():
            cache = SlotCache(config=model.config.get_text_config(decoder=True))
            model(**meta_inputs(model), use_cache=True, **with_cache(model, cache))
    except Exception:  # whatever the architecture raises
        return {}
    return {path: length - TOKENS - 1 for path, length in lengths.items() if length > TOKENS}


class StopTrace(Exception):
    """Ends a pass whose rest would say nothing new."""


def own_softmax(config: PreTrainedConfig, model_class: type[PreTrainedModel]) -> Run:
    """The same for attention that modules compute in code of their own; some of it knows one dtype alone."""
    for dtype in (torch.bfloat16, torch.float32):
        run = Run()
        try:
            run.model = build_on_meta(config, model_class, dtype=dtype)
            _watch(run)
            inputs = meta_inputs(run.model)
            run.follow = PatchTracer(run.model, inputs)
            with quiet(), ValuesAreZero(), run.follow:
                run.records += softmax_calls(run.model, inputs, run.follow)
            return run
        except Exception as error:
            run.error = error
            if isinstance(error, OtherForm):
                break
    return run


def _watch(run: Run) -> None:
    """Let each module know its path and what it was given, and note whether it runs."""
    assert run.model is not None
    parts: list[tuple[str, Any]] = list(run.model.named_modules())
    for path, part in parts:
        part._linearize_path, part._linearize_run = path, run
        part.register_forward_pre_hook(_note, with_kwargs=True)


def _note(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    module._linearize_run.ran.add(module._linearize_path)
    module._linearize_mask = kwargs.get("attention_mask")
    module._linearize_given = args, kwargs
    x = kwargs.get("hidden_states", args[0] if args else None)
    module._linearize_shape = tuple(x.shape) if isinstance(x, Tensor) and x.ndim == 3 else None


class ValuesAreZero(TorchDispatchMode):
    """Answers questions about values, which tensors on the meta device lack, as if all of them were zero."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default and args[0].is_meta:
            return False if args[0].dtype == torch.bool else 0
        if func is torch.ops.aten.nonzero.default and args[0].is_meta:
            return args[0].new_empty((0, args[0].ndim), dtype=torch.long)
        return func(*args, **(kwargs or {}))


def _record(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **kwargs: Any
) -> tuple[Tensor, None]:
    """The recording attention function: notes the call and returns zeros of the right shape."""
    B, H, T, D = query.shape
    run, shape, (args, named) = module._linearize_run, module._linearize_shape, module._linearize_given
    given = {**dict(zip(inspect.signature(type(module).forward).parameters, (module, *args), strict=False)), **named}
    where, stated = run.follow.place(shape or (B, T), module, given), kwargs.get("is_causal")
    stated = getattr(module, "is_causal", None) if stated is None else stated
    decodes = run.follow.decodes(T)  # some decoders say no, and trust their mask
    run.records.append(
        {
            "module": module,
            "path": module._linearize_path,
            "hidden": shape and shape[-1],
            "heads": H,
            "kv_heads": key.shape[1],
            "key_dim": D,
            "value_dim": value.shape[-1],
            "scale": D**-0.5 if kwargs.get("scaling") is None else float(kwargs["scaling"]),
            "causal": decodes or looks_back(stated, run.model, where),
            "denies": decodes and stated is False,
            "extras": _extras(module, attention_mask, kwargs),
            "keys": key.shape[2],
            "queries": T,
            "routed": True,
            "rotation": given.get("position_embeddings") is not None,
            **where,
            "plain_mask": attention_mask is None or hasattr(attention_mask, "_linearize_plain"),
        }
    )
    return query.new_zeros(B, T, H, value.shape[-1]), None


def _extras(module: Any, mask: Any, kwargs: dict[str, Any]) -> tuple[str, ...]:
    """Names of what softmax is given and a linear layer would not use; `score_bias` for what is hidden in the mask."""
    names = {n for n, value in kwargs.items() if n not in ORDINARY and value is not None and value is not False}
    given = module._linearize_mask
    if isinstance(mask, Tensor) and mask.is_floating_point():
        # With memory of its own: the module has added something to the mask that it was given. Images have no masks.
        added = isinstance(given, Tensor) and mask.untyped_storage()._cdata != given.untyped_storage()._cdata
        names |= {"score_bias"} if added or module._linearize_run.follow.images is not None else set()
    return tuple(sorted(names))


def _full_mask(batch_size: int, q_length: int, kv_length: int, **kwargs: Any) -> Tensor:
    """A 4D mask, so that architectures which read its shape find one, that is known again when attention gets it."""
    mask: Any = torch.ones(batch_size, 1, q_length, kv_length, dtype=torch.bool, device="meta")
    mask._linearize_plain = True
    return mask


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Silence transformers' log lines, bars and warnings about a model that is only looked at."""
    level, bars = hf_logging.get_verbosity(), hf_logging.is_progress_bar_enabled()
    hf_logging.set_verbosity_error()
    hf_logging.disable_progress_bar()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        hf_logging.set_verbosity(level)
        if bars:
            hf_logging.enable_progress_bar()
