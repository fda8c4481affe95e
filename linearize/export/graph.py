"""A converted model as one function of tensors, and that function as a graph of ONNX.

torch.onnx writes the graph. Two operators stand for attention: LinearAttention (opset 27) is the recurrence of a linear
layer (of its rules `gated` is GLA, and with one decay for each head RetNet; `gated_delta` is Gated DeltaNet), and
Attention (opset 24) is the softmax of a layer, or of heads, that keep it. States, keys and values go into the graph and
come out of it, so a prompt and each token after it are calls of the same graph.

Letters: B batch, T new tokens, L tokens so far with the new ones, H query heads, Hkv key heads, E memories, D key dim,
F features, Dv value dim.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import AttentionInterface
from transformers.masking_utils import AttentionMaskInterface

from linearize_kernels.layers.softmax_heads import score_options

from ..errors import Exit, LinearizeError
from ..probe.trace import quiet
from ..verify.child.inputs import cache_of
from .ring import ring_attention

OPSET = 27
# Mechanism -> rule of LinearAttention.
RULES = {"gla": "gated", "retnet": "gated", "gdn": "gated_delta"}
EXPORTED = (*RULES, "window")
# The softmax of the layers that keep it, as transformers' registry knows it while a graph is written.
BACKEND = "onnx_attention"


class Part(NamedTuple):
    """One tensor of a layer's state, as the graph names it; `grows` is whether it has a place for each token, in its
    third dimension."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    grows: bool

    def zeros(self, B: int, tokens: int = 0) -> Tensor:
        """What it is before the first token, or after `tokens` of them, for B rows."""
        shape = (self.shape[0], tokens, self.shape[2]) if self.grows else self.shape
        return torch.zeros(B, *shape, dtype=self.dtype)


class OneGraph(nn.Module):
    """A converted model as a function of tokens [B,T], of the mask [B,L] that is 0 at padding, and of the parts of its
    state, to logits and the parts afterwards. From then on the model can do nothing else."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model
        self.parts: list[Part] = []
        self.mask = torch.empty(0)
        self.past: dict[str, Tensor] = {}
        self.present: dict[str, Tensor] = {}
        cache = cache_of(model(input_ids=torch.zeros(1, 1, dtype=torch.long), use_cache=True))
        linear = {layer["site"]["layer"]: layer for layer in model.config.linearize["layers"]}
        for number, slot in enumerate(cache.layers):
            if number in linear:
                mixer = model.get_submodule(linear[number]["site"]["path"]).mixer
                for name, tensor in named(slot.state, str(number)):
                    # The keys and values [B,S,K,.] of heads that keep softmax, of which Attention takes [B,K,S,.].
                    grows = mixer.softmax is not None and name.startswith(f"{number}_softmax_")
                    self.add(name, tensor.transpose(1, 2) if grows else tensor, grows)
                if mixer.softmax is not None:  # a frozen dataclass
                    vars(mixer.softmax)["attend"] = self.kept_heads(str(number), mixer.softmax.scale)
                if linear[number]["mechanism"] in RULES:
                    mixer.recur = recurrence(mixer, RULES[linear[number]["mechanism"]])
                else:
                    mixer.mix = window_alone(mixer)
                if mixer.near is not None:
                    mixer.near.attend = window_beside(mixer.near)
                mixer.forward = self.with_state(mixer.forward, slot.state, str(number))
            else:
                self.add(f"{number}_keys", slot.keys, True)
                self.add(f"{number}_values", slot.values, True)
        AttentionInterface.register(BACKEND, self.softmax)
        AttentionMaskInterface.register(BACKEND, lambda *args, **kwargs: None)
        model.set_attn_implementation(BACKEND)

    def add(self, name: str, tensor: Tensor, grows: bool) -> None:
        """Note a part, of which `tensor` is that of one row."""
        self.parts.append(Part(name, tuple(tensor.shape[1:]), tensor.dtype, grows))

    def with_state(self, forward: Callable[..., Any], example: Any, prefix: str) -> Callable[..., Any]:
        """A mixer's `forward` from and to the parts of its state, which is like `example`."""

        def run(q: Tensor, k: Tensor, v: Tensor, x: Tensor, layout: Any, state: Any = None) -> tuple[Tensor, Any]:
            layout = layout._replace(padding=self.mask[:, -q.shape[1] :].bool(), segments=None)
            o, after = forward(q, k, v, x, layout, filled(example, prefix, self.past))
            self.present |= dict(named(after, prefix))
            return o, after

        return run

    def softmax(
        self, module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, **kwargs: Any
    ) -> tuple[Tensor, None]:
        """An attention function of transformers: query [B,H,T,D], key and value [B,Hkv,T,.] -> [B,T,H,Dv]."""
        number = str(module.layer_idx)
        o, keys, values = self.attention(
            number, query, key, value, self.past[f"{number}_keys"], self.past[f"{number}_values"],
            kwargs["scaling"], score_options(kwargs),
        )  # fmt: skip
        self.present |= {f"{number}_keys": keys, f"{number}_values": values}
        return o.transpose(1, 2), None

    def kept_heads(self, number: str, scale: float) -> Callable[..., Any]:
        """What takes the place of `attend` for the heads of layer `number` that keep softmax; its state has keys and
        values [B,K,S,.]."""

        def attend(q: Tensor, k: Tensor, v: Tensor, layout: Any, state: Any) -> tuple[Tensor, Any]:
            q, k, v = (y.transpose(1, 2) for y in (q, k, v))
            o, keys, values = self.attention(number, q, k, v, state.keys, state.values, scale, layout.scores)
            return o.transpose(1, 2), type(state)(keys, values, None)

        return attend

    def attention(
        self, number: str, query: Tensor, key: Tensor, value: Tensor, keys: Tensor, values: Tensor, scale: float,
        scores: Any,
    ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        """The operator Attention: query [B,H,T,D], key and value [B,Hkv,T,.] behind `keys` and `values` [B,Hkv,S,.] ->
        o [B,H,T,Dv], and all keys and values [B,Hkv,L,.]. `scores` is what layer `number` does to its scores."""
        if scores.sinks is not None:
            message = f"layer {number} keeps softmax with sinks, which the operator Attention does not have"
            raise LinearizeError(message, Exit.INCOMPATIBLE)
        B, L, T = *self.mask.shape, query.shape[2]
        place = torch.arange(L)
        query_place = place[L - T :, None]
        seen = place <= query_place
        if scores.window is not None:
            seen = seen & (place > query_place - scores.window)
        # A token of padding sees itself: runtimes differ in what softmax over nothing is.
        seen = seen & self.mask.bool()[:, None, None] | (place == query_place)
        shapes = (
            (*query.shape[:3], value.shape[3]),
            (B, key.shape[1], L, key.shape[3]),
            (B, value.shape[1], L, value.shape[3]),
        )
        attributes: dict[str, Any] = {"scale": float(scale), "softcap": float(scores.cap or 0.0)}
        o, keys, values = torch.onnx.ops.symbolic_multi_out(
            "::Attention", (query, key, value, seen, keys, values), attributes,
            dtypes=(query.dtype, key.dtype, value.dtype), shapes=shapes,
        )  # fmt: skip
        return o, keys, values

    def forward(self, input_ids: Tensor, attention_mask: Tensor, past: list[Tensor]) -> tuple[Tensor, ...]:
        names = [part.name for part in self.parts]
        self.mask, self.past, self.present = attention_mask, dict(zip(names, past, strict=True)), {}
        places = (attention_mask.cumsum(1) - 1).clamp_min(0)[:, -input_ids.shape[1] :]
        logits = self.model(input_ids=input_ids, position_ids=places, use_cache=False).logits
        return (logits, *(self.present[name] for name in names))

    def empty(self, B: int) -> list[Tensor]:
        """The state before the first token."""
        return [part.zeros(B) for part in self.parts]


def named(state: Any, prefix: str) -> Iterator[tuple[str, Tensor]]:
    """The tensors of a state, which may hold other states, by name; without those that have no elements."""
    for field, value in state._asdict().items():
        if isinstance(value, tuple):
            yield from named(value, f"{prefix}_{field}")
        elif value is not None and value.numel():
            yield f"{prefix}_{field}", value


def filled(example: Any, prefix: str, tensors: dict[str, Tensor]) -> Any:
    """A state like `example` of tensors by name; None where there is none."""
    values = {
        field: filled(value, f"{prefix}_{field}", tensors)
        if isinstance(value, tuple)
        else tensors.get(f"{prefix}_{field}")
        for field, value in example._asdict().items()
    }
    return type(example)(**values)


def window_beside(near: Any) -> Callable[..., Any]:
    """What takes the place of `attend` in the window beside a mechanism."""
    sizes = {"window": near.window, "sink": near.sink, "scale": near.scale}
    return lambda q, k, v, layout, state: ring_attention(q, k, v, **sizes, padding=layout.padding, state=state)


def window_alone(mixer: Any) -> Callable[..., Any]:
    """What takes the place of `mix` in the mechanism `window`."""
    sizes = {"window": mixer.window, "sink": mixer.sink, "scale": mixer.site.scale}

    def mix(q: Tensor, k: Tensor, v: Tensor, x: Tensor, layout: Any, state: Any) -> tuple[Tensor, Any]:
        o, _, state = ring_attention(q, k, v, **sizes, padding=layout.padding, state=state)
        return o, state

    return mix


def recurrence(mixer: Any, rule: str) -> Callable[..., Any]:
    """What takes the place of a mixer's `recur`, the operator."""

    def recur(
        op: Any, layout: Any, state: Any, q: Tensor, k: Tensor, v: Tensor, *gates: Tensor, scale: float, log_decay:
        Tensor | None = None, **of_sla: None,
    ) -> tuple[Tensor, Any]:  # fmt: skip
        (B, T, H, _), E = q.shape, mixer.state_count
        real = layout.padding
        k = torch.where(real[:, :, None, None], k, 0.0)  # so padding writes nothing, and forgets nothing
        k, v = (y if y.shape[2] == E else y.repeat_interleave(E // y.shape[2], 2) for y in (k, v))
        decay = gates[0].flatten(2) if log_decay is None else log_decay.expand(B, T, -1)
        decay = torch.where(real[:, :, None], decay, 0.0)
        (past,), beta = state, gates[1] if len(gates) > 1 else None
        attributes: dict[str, Any] = {"scale": float(scale), "q_num_heads": H, "kv_num_heads": E, "update_rule": rule}
        inputs = (q.flatten(2), k.flatten(2), v.flatten(2), past, decay, beta)
        o, after = torch.onnx.ops.symbolic_multi_out(
            "::LinearAttention", inputs if beta is not None else inputs[:5], attributes, dtypes=(v.dtype, past.dtype),
            shapes=((B, T, H * v.shape[3]), tuple(past.shape)),
        )  # fmt: skip
        return o.unflatten(2, (H, v.shape[3])), type(state)(after)

    return recur


def write(graph: OneGraph, path: Path) -> None:
    """Write a graph as a file of ONNX, its weights beside it. Both lengths of a call, and its rows, stay free."""
    dynamic = torch.export.Dim.DYNAMIC
    tokens = torch.zeros(2, 3, dtype=torch.long)
    past = [part.zeros(2, 4) for part in graph.parts]
    shapes = [{0: dynamic, 2: dynamic} if part.grows else {0: dynamic} for part in graph.parts]
    names = [part.name for part in graph.parts]
    with quiet(), torch.no_grad():
        program = torch.onnx.export(
            graph, (tokens, torch.ones(2, 7, dtype=torch.long), past),
            dynamo=True, verbose=False, opset_version=18,
            optimize=False,  # onnxscript's optimizer takes the 1e-12 in front of a square root for 0
            input_names=["input_ids", "attention_mask", *(f"past_{name}" for name in names)],
            output_names=["logits", *(f"present_{name}" for name in names)],
            dynamic_shapes=({0: dynamic, 1: dynamic}, {0: dynamic, 1: dynamic}, shapes),
        )  # fmt: skip
    assert program is not None
    # What torch writes means the same in later opsets, of which it knows none with LinearAttention.
    program.model.opset_imports[""] = OPSET
    program.save(str(path), external_data=True)
