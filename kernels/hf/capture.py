"""Attention modules that compute softmax in code of their own: it is found while they run, and a mixer takes its place.

Falcon, BLOOM, MPT, GPT-J and others never call transformers' attention interface. Their forward runs as it is, and
this file sees each torch function that it calls:

    q [..,T,D] times k [..,D,S]     -> scores: the right shape without memory, so no T x S product is computed
    scale, masks, biases, softmax   -> still only a shape; a mask tells which of the tokens are padding
    weights times v [..,S,Dv]       -> o, from attention_hooks.py as for any other module

(or one call of scaled_dot_product_attention). Projections, their layouts, clipping, rotary embedding and residuals
stay the architecture's own, and no architecture is known by name. The softmax model runs none of this.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from .interface import TRANSFER, split_name
from ..layout import shown, this_thread, token_padding

PRODUCTS = {"matmul", "bmm", "baddbmm"}
# These change nothing that is known of scores; on the meta device a division alone takes 150 us.
SAME = {"mul", "div", "softmax", "dropout"}
DEVICE = Tensor.device.__get__
ELEMENTWISE = {"add", "sub", "mul", "div", "where", "masked_fill", "maximum", "minimum", "max", "min"}


@dataclasses.dataclass
class Scores:
    """What is known of one product of queries q [..,T,D] and keys k [..,S,D], on its way to the values."""

    q: Tensor
    k: Tensor
    # Which of the new tokens are real, [B,T] bool, as far as masks say.
    real: Tensor | None = None
    softmax: bool = False
    # What each of them may see, [B,1,T,S] bool, where that is asked.
    visible: Tensor | None = None


# Given scores, v [B,Hkv,S,Dv] and a function that computes softmax's own answer [B,T,H,Dv]: o [B,T,H,Dv].
Attend = Callable[[Scores, Tensor, Callable[[], Tensor]], Tensor]


def capture(module: Any) -> None:
    """Make an attention module without the interface go through its mixer's attention function, whenever the switch says so."""
    module.forward = functools.partial(run, module)


# Traced, the hooks around it and what follows a graph break inside it would not find each other's notes.
@torch.compiler.disable
def run(module: Any, *args: Any, **kwargs: Any) -> Any:
    """The module's forward: its own code, and inside it the mixer where softmax was."""
    own = functools.partial(type(module).forward, module)
    mixer = module.mixer
    prefix, _ = split_name(mixer.switch._attn_implementation)
    if not prefix:
        return own(*args, **kwargs)
    call = mixer.calls[this_thread()]

    def attend(found: Scores, v: Tensor, softmax: Callable[[], Tensor]) -> Tensor:
        mask: Any = None
        if found.real is not None:
            # A mask that says which of the new tokens are real, with memory for one row.
            before = min(v.shape[2] - shape[1], seen)
            columns = F.pad(found.real, (before, v.shape[2] - shape[1] - before))
            mask = columns[:, None, None].expand(-1, 1, shape[1], -1)
            mask.of_transformers = "causal" if mixer.site.causal else "bidirectional"
        mask = mask if found.visible is None else found.visible
        q, k = (part.reshape(*v.shape[:1], -1, *part.shape[-2:]).to(v.dtype) for part in (found.q, found.k))
        places = {**call.places, "is_causal": mixer.site.causal}
        return mixer.attention_function(
            mixer, prefix, lambda *_, **__: (softmax(), None), module, q, k, v, mask, **places
        )[0]

    softmax_too = prefix == TRANSFER and call.teacher_output is None
    shape, seen = call.x.shape[:2], 0 if call.slot is None else call.slot.seen
    bound = {**dict(zip(mixer.arguments, args, strict=False)), **kwargs}
    with Capture(attend, shape, seen, softmax_too, whole="own_mask" in call.places):
        output = own(**{name: new_columns(name, value, shape, seen) for name, value in bound.items()})
    return tuple(None if scores_of(part) else part for part in output) if isinstance(output, tuple) else output


def new_columns(name: str, value: Any, shape: tuple[int, ...], seen: int) -> Any:
    """A mask [B,1,T,seen+T] without the columns of keys that a state holds: XGLM compares its shape with that of k."""
    B, T = shape
    whole = "mask" in name and isinstance(value, Tensor) and value.shape == (B, 1, T, seen + T)
    return value[..., seen:] if whole else value


def scores_of(value: Any) -> Scores | None:
    """The scores that a tensor is made of, if any."""
    return getattr(value, "_linearize_scores", None) if isinstance(value, Tensor) else None


class OtherForm(NotImplementedError):
    """Attention that is no softmax(q k) v."""


class Capture(TorchFunctionMode):
    """Finds softmax(q k) v among the functions called within, for B sequences of T tokens after `seen` cached ones.

    `compute`: scores and weights are real tensors, without gradients, and softmax's own answer can be had. `whole`:
    masks tell what each token may see, not only which are padding.
    Raises OtherForm where attention is something else.
    """

    kind = Scores

    def __init__(
        self, attend: Attend, shape: tuple[int, int], seen: int = 0, compute: bool = False, whole: bool = False
    ) -> None:
        super().__init__()
        self.attend, self.shape, self.seen, self.compute, self.whole = attend, shape, seen, compute, whole
        self.met = False  # a product of queries and keys: before it there are no scores to look for

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name, fused = getattr(function, "__name__", "").strip("_"), function is F.scaled_dot_product_attention
        if not (self.met or fused or name in PRODUCTS):
            return function(*args, **(kwargs or {}))
        if function == DEVICE and (found := scores_of(args[0])):  # some masks are moved to where scores are
            return found.q.device
        call = functools.partial(function, *args, **(kwargs or {}))
        given = [part for value in (*args, *call.keywords.values()) for part in _parts(value)]
        tensors = [value for value in given if isinstance(value, Tensor)]
        if fused:
            return self.fused(call, *args, **call.keywords)
        held = next(filter(scores_of, tensors), None)
        if name in PRODUCTS and min(value.ndim for value in tensors) > 2:
            if held is not None:
                return self.values(scores_of(held), tensors[-1], held.shape, call)
            *bias, q, k = tensors
            return self.product(q, k, bias, call) if q.shape[-2] == self.shape[1] else call()
        return call() if held is None else self.onwards(name, held, tensors, call)

    def product(self, q: Tensor, k: Tensor, bias: list[Tensor], call: functools.partial[Tensor]) -> Tensor:
        """q [..,T,D] times k [..,D,S]; `baddbmm` adds a bias."""
        found, self.met = self.kind(q, k.transpose(-1, -2)), True
        for tensor in bias:
            self.meet("add", tensor, found)
        if not self.compute:
            return mark(q.new_empty(*q.shape[:-1], k.shape[-1], device="meta"), found)
        with torch.no_grad():
            return mark(call(), found)

    def onwards(self, name: str, held: Tensor, tensors: list[Tensor], call: functools.partial[Any]) -> Any:
        """Any other function of scores: they keep their shape beside other tensors, of which masks are read."""
        found: Any = scores_of(held)
        others = [tensor for tensor in tensors if tensor is not held and tensor.ndim]
        mixed = bool(others)
        if name == "mul" and len(others) == 1 and others[0].shape[-2:] == (1, 1) and not found.softmax:
            found.q, others = found.q * others[0], []  # a temperature for each head
        for other in others:
            if scores_of(other) or name not in ELEMENTWISE:
                raise OtherForm(f"scores go through {name} with another tensor")
            self.meet(name, other, found)
        found.softmax = found.softmax or name == "softmax"
        same = name in SAME and "dtype" not in call.keywords
        if (mixed or same) and not self.compute:
            return held
        with torch.no_grad():
            return mark(call(), found)

    def meet(self, name: str, other: Tensor, found: Scores) -> None:
        """A tensor is combined with scores: a token that it hides from itself is padding."""
        B, T = self.shape
        if other.dtype != torch.bool and name != "add":
            return
        mask = ~other if name == "masked_fill" else other
        if mask.ndim == 3 and mask.shape[0] == B * found.q.shape[-3]:
            mask = mask.unflatten(0, (B, -1))
        if mask.ndim == 5:  # rows and windows
            mask = mask.flatten(0, 1).repeat(B // mask.shape[:2].numel(), 1, 1, 1)
        mask = mask[(None,) * (4 - mask.ndim)][:, :1].expand(-1, -1, T, -1)
        real = token_padding(mask, B, T, self.seen)
        found.real = real if found.real is None else found.real & real
        if self.whole:
            visible = shown(mask)
            found.visible = visible if found.visible is None else found.visible & visible

    def fused(
        self, call: Any, query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, *_: Any, **__: Any
    ) -> Tensor:
        """scaled_dot_product_attention: everything in one function."""
        if query.shape[-2] != self.shape[1]:  # of other tokens than the module was given, as `product`
            return call()
        found = self.kind(query, key, softmax=True)
        if attn_mask is not None:
            self.meet("add" if attn_mask.is_floating_point() else "where", attn_mask, found)
        return self.values(found, value, query.shape, call)

    def values(self, found: Any, v: Tensor, shape: torch.Size, call: functools.partial[Tensor]) -> Tensor:
        """Weights [..,T,S] times v [..,S,Dv] -> o [..,T,Dv]."""
        if not found.softmax:
            raise OtherForm("scores meet values without a softmax")
        B, T = self.shape
        value = v.reshape(B, -1, *v.shape[-2:])
        o = self.attend(found, value, lambda: call().reshape(B, -1, T, v.shape[-1]).transpose(1, 2))
        o = o.transpose(1, 2).reshape(*shape[:-1], v.shape[-1]).to(v.dtype)
        # Where heads have a dimension of their own, tokens come before them next: no copy there and back.
        return o if o.ndim == 4 else o.contiguous()


def _parts(value: Any) -> tuple[Any, ...] | list[Any]:
    return value if isinstance(value, tuple | list) else (value,)


def mark(value: Any, found: Scores) -> Any:
    """Note on a tensor what it is made of."""
    if isinstance(value, Tensor):
        value._linearize_scores = found  # type: ignore[attr-defined]
    return value
