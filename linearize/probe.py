"""Probe: which attention modules a model has, found by running it once on the meta device.

A recording attention function is registered with transformers; one short forward then names every module that
calls it, with the shapes that it calls it with. A model that calls it nowhere runs once more, to find softmax in its
own code (unrouted.py). No weights are read and no architecture is known by name.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from transformers import AttentionInterface, PreTrainedConfig, PreTrainedModel
from transformers.masking_utils import AttentionMaskInterface
from transformers.utils import logging as hf_logging

from linearize_kernels.mixer import Site

from .errors import Exit, LinearizeError
from .unrouted import softmax_calls

PROBE = "linearize_probe"
TOKENS = 8
# Keyword arguments of attention functions that every architecture passes or that mean nothing to a mixer.
ORDINARY = {"scaling", "dropout", "is_causal", "position_ids", "attention_mask", "use_cache", "output_attentions"}
ORDINARY |= {"output_hidden_states", "past_key_values", "cache_position", "position_embeddings", "head_mask"}
ORDINARY |= {"layer_idx", "logits_to_keep"}


def build_on_meta(
    config: PreTrainedConfig, model_class: type[PreTrainedModel], implementation: str | None = None
) -> PreTrainedModel:
    """The model of `config` without memory behind its weights."""
    config = type(config).from_dict(config.to_dict())
    config._attn_implementation = implementation
    with quiet(), torch.device("meta"):
        # bfloat16, because grouped expert products know no other dtype on the meta device.
        return model_class._from_config(config, dtype=torch.bfloat16).eval()


def model_class_of(config: PreTrainedConfig) -> type[PreTrainedModel]:
    """The transformers class that `architectures` names, else the causal class of the model type.

    Raises LinearizeError (exit 3) when transformers knows neither, or for a class that does not generate text.
    """
    for name in config.architectures or ():
        found = getattr(transformers, str(name), None)
        if isinstance(found, type) and issubclass(found, PreTrainedModel):
            if not found.can_generate():
                raise LinearizeError(
                    f"the checkpoint is a {name}, which does not generate text. Choose a causal language model",
                    Exit.INCOMPATIBLE,
                )
            return found
    mapping: Any = transformers.AutoModelForCausalLM._model_mapping
    if type(config) in mapping:
        found = mapping[type(config)]
        return found[0] if isinstance(found, tuple) else found
    raise LinearizeError(
        f"model type {config.model_type!r} with architectures {config.architectures} has no causal language model "
        f"class in transformers {transformers.__version__}. Choose a causal checkpoint or upgrade transformers",
        Exit.INCOMPATIBLE,
    )


def probe(config: PreTrainedConfig, model_class: type[PreTrainedModel]) -> list[Site]:
    """The softmax attention modules of a model, in the order in which they run.

    Raises LinearizeError (exit 3) when the model cannot be built or run on the meta device, or calls no attention.
    """
    records, obstacle = _interface_calls(config, model_class)
    if not records:
        records, second = _own_softmax(config, model_class)
        # A KeyError of that name: the class looks its attention up in a table of its own.
        if second is None or (isinstance(obstacle, KeyError) and obstacle.args == (PROBE,)):
            obstacle = second
    if obstacle:
        raise LinearizeError(
            f"{model_class.__name__} cannot be probed on the meta device: {type(obstacle).__name__}: {obstacle}",
            Exit.INCOMPATIBLE,
        ) from obstacle
    if not records:
        raise LinearizeError(
            f"no attention found: {model_class.__name__} ({config.model_type}) made no call through transformers' "
            "attention interface and computes no softmax over keys of its own. Attention-like modules seen: "
            + (_candidates(build_on_meta(config, model_class)) or "none"),
            Exit.INCOMPATIBLE,
        )
    sites = [_site(number, record) for number, record in enumerate(records)]
    for site in sites:
        if [other.path for other in sites].count(site.path) > 1:
            raise LinearizeError(
                f"{site.path} ({site.kind}) runs more than once in a forward pass, so one state cannot serve it",
                Exit.INCOMPATIBLE,
            )
    return sites


Found = tuple[list[dict[str, Any]], Exception | None]


def _interface_calls(config: PreTrainedConfig, model_class: type[PreTrainedModel]) -> Found:
    """A record for each call of the attention interface, and what the architecture's own code raised, if it did."""
    records: list[dict[str, Any]] = []
    AttentionInterface.register(PROBE, _record)
    AttentionMaskInterface.register(PROBE, _full_mask)
    try:
        model = build_on_meta(config, model_class, PROBE)
        parts: list[tuple[str, Any]] = list(model.named_modules())
        for path, part in parts:
            part._linearize_path, part._linearize_records = path, records
            part.register_forward_pre_hook(_keep_hidden, with_kwargs=True)
    except Exception as error:  # whatever the architecture raises
        return [], error
    ids = torch.zeros(1, TOKENS, dtype=torch.long, device="meta")
    # An explicit 4D mask is passed on as it is, so that no architecture inspects values; some know no such mask.
    obstacle = None
    for mask in (torch.ones(1, 1, TOKENS, TOKENS, dtype=torch.bool, device="meta"), None):
        records.clear()
        try:
            with quiet(), torch.no_grad():
                model(input_ids=ids, attention_mask=mask, use_cache=False)
            return records, None
        except Exception as error:
            obstacle = obstacle or error
    return [], obstacle


def _own_softmax(config: PreTrainedConfig, model_class: type[PreTrainedModel]) -> Found:
    """The same for attention that modules compute in code of their own."""
    try:
        with quiet():
            return softmax_calls(build_on_meta(config, model_class), TOKENS), None
    except Exception as error:
        return [], error


def _keep_hidden(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    x = kwargs.get("hidden_states", args[0] if args else None)
    module._linearize_hidden = x.shape[-1] if isinstance(x, Tensor) and x.ndim == 3 else None
    module._linearize_mask = kwargs.get("attention_mask")


def _record(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **kwargs: Any
) -> tuple[Tensor, None]:
    """The recording attention function: notes the call and returns zeros of the right shape."""
    B, H, T, D = query.shape
    module._linearize_records.append(
        {
            "module": module,
            "path": module._linearize_path,
            "hidden": module._linearize_hidden,
            "heads": H,
            "kv_heads": key.shape[1],
            "key_dim": D,
            "value_dim": value.shape[-1],
            "scale": D**-0.5 if kwargs.get("scaling") is None else float(kwargs["scaling"]),
            "causal": _causal(module, kwargs),
            "extras": _extras(module, attention_mask, kwargs),
            "self": key.shape[2] == T,
            "routed": True,
        }
    )
    return query.new_zeros(B, T, H, value.shape[-1]), None


def _extras(module: Any, mask: Any, kwargs: dict[str, Any]) -> tuple[str, ...]:
    """Names of what softmax is given and a linear layer would not use; `score_bias` for what is hidden in the mask."""
    names = {name for name, value in kwargs.items() if name not in ORDINARY and _says(value)}
    given = module._linearize_mask
    if isinstance(given, Tensor) and isinstance(mask, Tensor) and mask.is_floating_point():
        # A float mask with memory of its own: the module has added something to the one that it was given.
        names |= {"score_bias"} if mask.untyped_storage()._cdata != given.untyped_storage()._cdata else set()
    return tuple(sorted(names))


def _says(value: Any) -> bool:
    return value is not None and value is not False


def _causal(module: nn.Module, kwargs: dict[str, Any]) -> bool:
    given = kwargs.get("is_causal")
    return bool(getattr(module, "is_causal", True) if given is None else given)


def _full_mask(batch_size: int, q_length: int, kv_length: int, **kwargs: Any) -> Tensor:
    """A 4D mask, so that architectures which read its shape find one."""
    return torch.ones(batch_size, 1, q_length, kv_length, dtype=torch.bool, device="meta")


def _site(number: int, record: dict[str, Any]) -> Site:
    module, own = record.pop("module"), record.pop("self")
    if not own or record["hidden"] is None:
        what = "takes keys from elsewhere" if not own else "gets no hidden states"
        raise LinearizeError(
            f"{record['path']} ({type(module).__name__}) {what}: not self-attention that can become linear",
            Exit.INCOMPATIBLE,
        )
    layer = getattr(module, "layer_idx", None)
    layer = number if layer is None else int(layer)
    return Site(layer=layer, kind=type(module).__name__, **record)


def _candidates(model: nn.Module) -> str:
    kinds = {type(m).__name__ for m in model.modules()}
    return ", ".join(sorted(k for k in kinds if any(w in k for w in ("Attention", "Attn", "Mixer", "SSM", "Mamba"))))


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
