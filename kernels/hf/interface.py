"""What this project registers with transformers: names `linearize_*` for attention and mask functions.

Several copies of these files meet in one process (the package, checkpoints, versions), and the registered names are
shared by all of them, the last one to register winning. So what is registered only dispatches to
`module.mixer.attention_function`, which belongs to the mixer's own copy: the names and this call are the one agreement
between versions.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface
from transformers.masking_utils import (
    ALL_MASK_ATTENTION_FUNCTIONS,
    AttentionMaskInterface,
    and_masks,
    causal_mask_function,
    or_masks,
)
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from ..layout import check_columns, is_causal, is_traced, mark_unpadded, named_documents

# linearize_sdpa: some layers keep softmax, through sdpa. linearize_all_sdpa: none does, so no T x T mask is built.
# linearize_transfer_sdpa: softmax runs everywhere, and each mixer is compared with it on the same input.
HYBRID, ALL, TRANSFER = "linearize_", "linearize_all_", "linearize_transfer_"


def split_name(name: str | None) -> tuple[str, str]:
    """`linearize_all_sdpa` -> (`linearize_all_`, `sdpa`); a foreign name -> (``, name)."""
    for prefix in (ALL, TRANSFER, HYBRID):
        if name and name.startswith(prefix):
            return prefix, name.removeprefix(prefix)
    return "", name or ""


def register_backend(backend: str) -> None:
    """Make the `linearize_*` names known for one softmax backend, both to attention and to masks."""
    for prefix in (HYBRID, ALL, TRANSFER):
        AttentionInterface.register(prefix + backend, functools.partial(dispatch, prefix, backend))
        AttentionMaskInterface.register(prefix + backend, functools.partial(make_mask, prefix, backend))


def dispatch(prefix: str, backend: str, module: nn.Module, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor | None]:
    """The registered attention function: softmax without a mixer, else whatever the mixer's own copy does. Keys in a
    static layer of a recorded step (static_layers.py) know how to be attended to, by whichever copy made it."""
    mixer = getattr(module, "mixer", None)
    softmax = softmax_function(backend, module)
    if mixer is None:
        static = getattr(args[1], "linearize_room", None) if len(args) > 1 else None
        args = documents_apart(backend, module, args, kwargs)
        return softmax(module, *args, **kwargs) if static is None else static().attend(softmax, module, *args, **kwargs)
    # A mixer of an earlier version has it under another name.
    attend = mixer.attention_function if hasattr(mixer, "attention_function") else mixer.seam
    return attend(mixer, prefix, softmax, module, *args, **kwargs)


def documents_apart(backend: str, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...]:
    """The arguments of softmax, whose mask keeps the documents apart that the call names (`named_documents`), as linear
    layers do. transformers finds documents in position_ids alone, and beside a padding mask or a cache not at all.

    Raises ValueError for a mask that is no tensor, and beside flash attention, where it would not find them by itself.
    """
    if len(args) < 4 or args[0].shape[2] == 1 or args[0].shape[2] > args[1].shape[2]:
        return args
    (query, key, value, mask), B, T, K = args[:4], args[0].shape[0], args[0].shape[2], args[1].shape[2]
    causal = is_causal(module, kwargs, True)
    # For architectures that do not tell their attention; images are told nothing of documents.
    hooks = getattr(module, "linearize_position_hooks", None) if causal else None
    told = {} if hooks is None else hooks.arguments(query.transpose(1, 2))
    told |= {name: given for name, given in kwargs.items() if given is not None}
    documents = named_documents(told, (B, T))
    # Flash attention finds them in positions of one row, and in bounds of several that have all it needs.
    finds = "flash" in backend and mask is None and (B == 1 or "max_length_q" in told)
    if documents is None or finds or not (causal or T == K):
        return args
    if "flash" in backend or not (mask is None or isinstance(mask, Tensor)):
        raise ValueError(
            f"cu_seq_lens_q or seq_idx with {backend}, and a mask or several rows: documents would not be kept apart. Pass "
            "one row and no attention_mask, or call set_attn_implementation('sdpa')"
        )
    cached = documents[:, :1].expand(B, K - T)  # tokens of a cache belong to the first document
    same = documents[:, None, :, None] == torch.cat([cached, documents], 1)[:, None, None]
    if mask is None:
        mask = same.tril(K - T) if causal else same
    else:
        mask = mask & same if mask.dtype == torch.bool else mask.masked_fill(~same, torch.finfo(mask.dtype).min)
    return query, key, value, mask, *args[4:]


def softmax_function(backend: str, module: nn.Module) -> Callable[..., Any]:
    """The softmax attention function called `backend`; eager ones live in the architecture's own file."""
    if backend == "eager":
        return sys.modules[type(module).__module__].eager_attention_forward
    if "flash" in backend:
        return functools.partial(under_own_name, backend)
    return ALL_ATTENTION_FUNCTIONS[backend]


def under_own_name(backend: str, module: Any, *args: Any, **kwargs: Any) -> Any:
    """Flash attention reads from the config which of its packages to load, so the config names it for the call."""
    name, module.config._attn_implementation_internal = module.config._attn_implementation, backend
    try:
        return ALL_ATTENTION_FUNCTIONS[backend](module, *args, **kwargs)
    finally:
        module.config._attn_implementation_internal = name


def direction(mask_function: Any, bidirectional: bool, joined: bool = False) -> str:
    """How tokens see each other in a mask that transformers is asked for: "causal", "bidirectional", or "mixed" where a
    function that may let a causal one see later tokens is joined to it.

    Joined by `and_masks`, functions hide only; `remap_positions_for_packed_sequence` changes what is called a position.
    `joined` says whether anything is: torch.compile cannot look into a function, torch.export can.
    """
    if bidirectional:
        return "bidirectional"
    causal = not joined if torch.compiler.is_dynamo_compiling() else mask_function is None or _looks_back(mask_function)
    return "causal" if causal else "mixed"


def _looks_back(mask_function: Any) -> bool:
    if mask_function is causal_mask_function:
        return True
    held = [cell.cell_contents for cell in getattr(mask_function, "__closure__", None) or ()]
    inner = [part for parts in held for part in (parts if isinstance(parts, tuple) else (parts,)) if callable(part)]
    return getattr(mask_function, "__module__", "") == and_masks.__module__ and (
        not mask_function.__qualname__.startswith(or_masks.__name__) and any(map(_looks_back, inner))
    )


def make_mask(prefix: str, backend: str, *args: Any, **kwargs: Any) -> Any:
    """The registered mask function: the backend's mask, or just the 2D padding mask when no layer needs more.

    Linear layers need it, too, where it may let tokens of a decoder see later ones (those of one image, say), to refuse
    it (`check_direction`). Raises ValueError for a padding mask of another length than its tokens.
    """
    seen = kwargs.get("q_offset", 0)
    # Masks of bidirectional attention may be of another sequence, in cross attention; then mixers look at their own.
    if isinstance(seen, int) and "q_length" in kwargs and "allow_is_bidirectional_skip" not in kwargs:
        check_columns(kwargs.get("attention_mask"), kwargs["q_length"], seen)
    joined = not kwargs.get("allow_is_causal_skip", True)
    asked = direction(kwargs.get("mask_function"), "allow_is_bidirectional_skip" in kwargs, joined)
    if prefix == ALL and asked == "mixed" and kwargs.get("q_length") != 1:
        backend = "sdpa"
    elif prefix == ALL:
        return mark_unpadded(kwargs.get("attention_mask"), kwargs.get("q_length"))
    mask: Any = ALL_MASK_ATTENTION_FUNCTIONS[backend](*args, **kwargs)
    if isinstance(mask, Tensor) and not is_traced(mask):
        mask.of_transformers = asked  # type: ignore[attr-defined]
    return mask
