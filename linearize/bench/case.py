"""What `linearize bench kernels` measures for one mechanism or for the exact window.

cases.py is the registry: the case `gsa` is its subclass `GSA` of `Case`; measuring, tables and pictures are shared.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

Run = Callable[[], Tensor]

# Contenders of ours; what else of them there is starts with the first.
OURS, PYTORCH, COMPILED = "linearize", "linearize, PyTorch path", ", compiled"


class Shape(NamedTuple):
    """B sequences of T tokens, H query heads over Hkv KV heads of D channels, M slots, blocks or tokens of a window
    where there are any.

    `dtype` is of q, k, v and the output, `gates` of whatever else goes in; `base` is what lies under SLA. `memories`
    are those of GSA, where they are not one for each KV head.
    """

    B: int
    T: int
    H: int
    Hkv: int
    D: int
    M: int = 0
    dtype: str = "bfloat16"
    gates: str = "float32"
    causal: bool = True
    base: str = ""
    memories: int = 0

    def __str__(self) -> str:
        heads = f"{self.H}/{self.Hkv}" if self.Hkv < self.H else str(self.H)
        parts = [f"B{self.B} T{self.T} H{heads} D{self.D}", f"m{self.M}" * bool(self.M), short(self.dtype)]
        parts += ["gates " + short(self.gates)] * (self.gates != "float32") + ["bidirectional"] * (not self.causal)
        parts += [f"over {self.base}"] * bool(self.base) + [f"{self.memories} memories"] * bool(self.memories)
        return " ".join(filter(None, parts))


def short(dtype: str) -> str:
    """bfloat16 -> bf16."""
    return dtype.replace("float", "f")


class Case:
    """One mechanism's op, its shapes and its peers. A subclass sets `function`, `shapes` and `errors`, and writes
    `inputs`; `steps` and `memory` or `state` where there is a decode step, `fla` where flash-linear-attention has the
    same.
    """

    # A staticmethod: called with what `inputs` gives, `backend` and, for a step, `state`; returns output and new state.
    function: ClassVar[Callable[..., Any]]
    # The class of its state, where that is one memory [B,Hkv,D,D].
    memory: ClassVar[Any] = None

    # Speed and memory; the first, cut to one sequence of 256 tokens, is also what the first call is timed with.
    shapes: ClassVar[tuple[Shape, ...]]
    # Errors against float64: each dtype once.
    errors: ClassVar[tuple[Shape, ...]]
    # Decode steps, T = 1.
    steps: ClassVar[tuple[Shape, ...]] = ()
    # Of what `inputs` returns, in its order.
    names: ClassVar[tuple[str, ...]] = ("q", "k", "v")
    # The PyTorch path keeps its intermediates in fp32: with more tokens it would measure the allocator.
    torch_tokens: ClassVar[int] = 16384
    # Those of the op, on a GPU.
    backends: tuple[str, ...] = ("triton", "torch")
    # What the kernels' products of fp32 are, where they have less than fp32.
    precision: ClassVar[str] = ""

    def named(self, shape: Shape) -> tuple[str, ...]:
        """`names`, where they do not depend on the shape."""
        return self.names

    def inputs(self, shape: Shape, device: str) -> list[Tensor]:
        """Random q [B,T,H,D], k and v [B,T,Hkv,D], and what else the op takes, as a model would give them."""
        raise NotImplementedError

    def op(self, inputs: list[Tensor], shape: Shape, backend: str) -> Tensor:
        """The forward pass, [B,T,H,D]; `backend` is `triton` or `torch` and insists."""
        return self.function(*inputs, backend=backend)[0]

    def peers(self, inputs: list[Tensor], shape: Shape, backend: str) -> dict[str, Run]:
        """Name -> forward pass of what else of this package it is to be compared with. The name of a variant of the
        op, whose errors are measured too, starts with OURS: here products of fp32 that are nearly exact, where the
        kernels' own are not."""
        if not self.precision or shape.dtype != "float32" or backend == "torch":
            return {}
        return {f"{OURS}, bf16x6": partial(self.op, inputs, shape, backend, "bf16x6")}  # type: ignore[call-arg]

    def fla(self, inputs: list[Tensor], shape: Shape) -> dict[str, Run]:
        """Name -> forward pass of flash-linear-attention's functions for the same; called where it is installed."""
        return {}

    def state(self, shape: Shape, device: str) -> Any:
        """A decode state of such a shape, a NamedTuple of tensors, filled with random numbers."""
        return self.memory(torch.randn(shape.B, shape.Hkv, shape.D, shape.D, device=device))

    def step(self, inputs: list[Tensor], state: Any, backend: str) -> Any:
        """One token more: the output and the new state."""
        return self.function(*inputs, state=state, backend=backend)

    def shorten(self, shape: Shape, tokens: int) -> Shape:
        """The shape with at most `tokens` tokens: fewer sequences, then shorter ones."""
        return shape._replace(B=max(1, min(shape.B, tokens // shape.T)), T=min(shape.T, tokens))


def random_qkv(shape: Shape, device: str) -> list[Tensor]:
    """q, k, v from a normal distribution, always the same."""
    B, T, H, Hkv, D = shape[:5]
    torch.manual_seed(0)
    return [torch.randn(B, T, heads, D, device=device).to(getattr(torch, shape.dtype)) for heads in (H, Hkv, Hkv)]


def softmax(inputs: list[Tensor], shape: Shape) -> dict[str, Run]:
    """Softmax attention by SDPA on the same q, k, v: other arithmetic for the same purpose. Flash in half precision,
    the memory-efficient kernel in fp32, which takes no grouped heads."""
    q, k, v = inputs[:3]
    if q.device.type == "cpu":
        return {"softmax, SDPA": partial(_sdpa, q, k, v, shape, list(SDPBackend.__members__.values()))}
    if q.dtype == torch.float32:
        return {"softmax, SDPA mem-efficient": partial(_sdpa, q, k, v, shape, [SDPBackend.EFFICIENT_ATTENTION])}
    return {"softmax, SDPA flash": partial(_sdpa, q, k, v, shape, [SDPBackend.FLASH_ATTENTION])}


def _sdpa(q: Tensor, k: Tensor, v: Tensor, shape: Shape, kernels: list[SDPBackend]) -> Tensor:
    if shape.Hkv < shape.H and kernels == [SDPBackend.EFFICIENT_ATTENTION]:
        k, v = (x.repeat_interleave(shape.H // shape.Hkv, 2) for x in (k, v))
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    grouped = q.shape[1] != k.shape[1]
    with sdpa_kernel(kernels):
        return scaled_dot_product_attention(q, k, v, is_causal=shape.causal, enable_gqa=grouped).transpose(1, 2)


def softmax_flops(shape: Shape) -> dict[str, int]:
    """Of forward, two products of T x T x D, and of both, seven; half of each where it is causal."""
    product = (1 if shape.causal else 2) * shape.B * shape.H * shape.T**2 * shape.D
    return {"forward": 2 * product, "both": 7 * product}
