"""Benchmark cases: one class for each mechanism and for the exact window, whose name in lower case is the case's."""

from __future__ import annotations

from functools import cache, partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention
from torch.nn.functional import logsigmoid, normalize, softplus

from linearize_kernels.gdn.eager import DeltaState
from linearize_kernels.gdn.gdn import gdn
from linearize_kernels.gla.gla import GLAState, gla
from linearize_kernels.gsa.gsa import GSAState, gsa
from linearize_kernels.la.la import LAState, la
from linearize_kernels.layout import Grid
from linearize_kernels.linear.launch import Precision
from linearize_kernels.mamba2.mamba2 import mamba2
from linearize_kernels.mhla.eager import MHLAState
from linearize_kernels.mhla.mhla import mhla, mhla_grid
from linearize_kernels.mhla.places import place_grid
from linearize_kernels.retnet.retnet import RetNetState, retnet
from linearize_kernels.saga.saga import Maps, saga
from linearize_kernels.sla.sla import op_of, sla
from linearize_kernels.window.window import window as window_attention

from ..errors import LinearizeError, did_you_mean
from .case import Case, Run, Shape, random_qkv

# Tokens and heads of one long row, which few programs would walk along.
LONG = tuple((T, H) for T in (16384, 131072) for H in (4, 8, 16))
DTYPES = ("bfloat16", "float16", "float32")


def load_case(name: str) -> Case:
    """The case `name`. Raises LinearizeError (exit 2) for an unknown one."""
    if name not in CASES:
        raise LinearizeError(
            f"--mechanism {name}: no kernels to measure.{did_you_mean(name, CASES)} Known: {', '.join(CASES)}, or all"
        )
    return CASES[name]()


def case_names() -> list[str]:
    """Names of all cases, sorted."""
    return sorted(CASES)


def equal_heads(B: int, T: int, H: int = 16, D: int = 128, **others: Any) -> Shape:
    """As many KV heads as query heads."""
    return Shape(B, T, H, H, D, **others)


def both_ways(B: int, T: int, H: int, D: int, M: int = 0, **others: Any) -> Shape:
    """Tokens of images and videos."""
    return equal_heads(B, T, H, D, M=M, causal=False, **others)


# Of a recurrence with one memory for each head: speed, errors, decode steps.
SHAPES = (equal_heads(8, 2048), *(equal_heads(1, *size) for size in LONG))
ERRORS = tuple(equal_heads(2, 1024, dtype=dtype) for dtype in DTYPES)
STEPS = (equal_heads(64, 1), equal_heads(1, 1))
# DiT-S/2 at 4096 tokens, three heads at 6400, Wan 2.1 at 21 x 30 x 50: B, T, H, D.
IMAGES = ((32, 4096, 6, 64), (16, 6400, 3, 64), (1, 31500, 12, 128))


class GDN(Case):
    function = staticmethod(gdn)
    memory = DeltaState
    shapes, errors, steps = SHAPES, ERRORS, STEPS
    names = ("q", "k", "v", "g", "beta")

    def inputs(self, shape: Shape, device: str) -> list[Tensor]:
        """Unit vectors q and k; half-lives around 40 tokens, writes of about a half."""
        q, k, v = random_qkv(shape, device)
        g, beta = (torch.randn(shape.B, shape.T, shape.Hkv, device=device) for _ in range(2))
        g, beta = logsigmoid(g + 4.0), beta.sigmoid()
        return [normalize(q, dim=-1), normalize(k, dim=-1), v, *(x.to(getattr(torch, shape.gates)) for x in (g, beta))]

    def fla(self, inputs: list[Tensor], shape: Shape) -> dict[str, Run]:
        """With triton 3.4 to 3.7.0 on Hopper it refuses to go backward, since gradients would be wrong (its issue
        #640): there also without that check."""
        from fla import utils
        from fla.ops.common import chunk_o
        from fla.ops.gated_delta_rule import chunk_gated_delta_rule

        q, k, v, g, beta = inputs

        def run(checked: bool) -> Tensor:
            chunk_o.TRITON_ABOVE_3_7_1 = utils.TRITON_ABOVE_3_7_1 if checked else True
            return chunk_gated_delta_rule(q, k, v, g, beta.to(q.dtype))[0]

        name = "fla chunk_gated_delta_rule"
        refused = utils.IS_NVIDIA_HOPPER and utils.TRITON_ABOVE_3_4_0 and not utils.TRITON_ABOVE_3_7_1
        runs: dict[str, Run] = {name: partial(run, True)}
        if refused:
            runs[f"{name}, its check taken out"] = partial(run, False)
        return runs


class GLA(Case):
    function = staticmethod(gla)
    memory = GLAState
    shapes = (SHAPES[0], SHAPES[0]._replace(gates="bfloat16"), *SHAPES[1:])
    errors = (ERRORS[0], ERRORS[0]._replace(gates="bfloat16"), *ERRORS[1:])
    steps = STEPS
    names = ("q", "k", "v", "g")

    def inputs(self, shape: Shape, device: str) -> list[Tensor]:
        """Gates as the paper's start: half-lives around 16 tokens."""
        qkv = random_qkv(shape, device)
        g = logsigmoid(torch.randn(shape.B, shape.T, shape.Hkv, shape.D, device=device)) / 16.0
        return [*qkv, g.to(getattr(torch, shape.gates))]

    def fla(self, inputs: list[Tensor], shape: Shape) -> dict[str, Run]:
        from fla.ops.gla import chunk_gla

        return {"fla chunk_gla": lambda: chunk_gla(*inputs)[0]}


def slots(B: int, T: int, H: int = 16, Hkv: int = 4, **others: Any) -> Shape:
    return Shape(B, T, H, Hkv, 128, 64, **others)


# The presets' options in Llama 3.1 8B: 128 slots, a memory for each query head.
PRESET = Shape(4, 2048, 32, 8, 128, 128, memories=32)


class GSA(Case):
    function = staticmethod(gsa)
    shapes = (
        PRESET,
        PRESET._replace(B=1, T=16384),
        slots(8, 2048),
        *(slots(1, T) for T in (8192, 16384, 65536)),
        *(slots(1, T, H, H) for T, H in LONG if H < 16),
    )
    errors = (
        PRESET._replace(B=2, T=1024),
        slots(2, 1024),
        slots(2, 1024, gates="bfloat16"),
        *(slots(2, 1024, dtype=dtype) for dtype in DTYPES[1:]),
    )
    steps = (*(PRESET._replace(B=B, T=1) for B in (16, 1)), *(slots(B, 1, 32, 8) for B in (64, 16, 1)))
    names = ("q", "k", "v", "g")

    def inputs(self, shape: Shape, device: str) -> list[Tensor]:
        """Half-lives of the slots spread from a few tokens to thousands, as at conversion."""
        qkv = random_qkv(shape, device)
        bias = torch.linspace(-2.0, 8.0, shape.M, device=device)
        size = shape.B, shape.T, shape.memories or shape.Hkv, shape.M
        g = logsigmoid(torch.randn(size, device=device) + bias) / 8.0
        return [*qkv, g.to(getattr(torch, shape.gates))]

    def fla(self, inputs: list[Tensor], shape: Shape) -> dict[str, Run]:
        from fla.ops.gsa import chunk_gsa

        q, g = inputs[0], inputs[3]

        def run() -> Tensor:
            copies = g.shape[2] // inputs[1].shape[2]  # its memories have keys of their own
            k, v = (x if copies == 1 else x.repeat_interleave(copies, 2) for x in inputs[1:3])
            return chunk_gsa(q, k, v, -torch.expm1(g).to(q.dtype), g.to(q.dtype), q.shape[-1] ** -0.5)[0]

        return {"fla chunk_gsa": run}

    def state(self, shape: Shape, device: str) -> GSAState:
        size = shape.B, shape.memories or shape.Hkv, shape.M, shape.D
        keys, values = (torch.randn(size, device=device) for _ in range(2))
        return GSAState(keys, values, torch.zeros(shape.B, device=device).long())


class LA(Case):
    function = staticmethod(la)
    shapes = (equal_heads(4, 10_000), equal_heads(4, 10_000, dtype="float32"), *(both_ways(*size) for size in IMAGES))
    errors = tuple(equal_heads(2, 1000, dtype=dtype, causal=causal) for causal in (True, False) for dtype in DTYPES)
    steps = STEPS
    torch_tokens = 140_000
    precision = "tf32"

    def inputs(self, shape: Shape, device: str) -> list[Tensor]:
        """Unit vectors q and k, as the paper's."""
        q, k, v = random_qkv(shape, device)
        return [normalize(q, dim=-1), normalize(k, dim=-1), v]

    def op(self, inputs: list[Tensor], shape: Shape, backend: Any, precision: Precision = "tf32") -> Tensor:
        return la(*inputs, causal=shape.causal, backend=backend, precision=precision)[0]

    def fla(self, inputs: list[Tensor], shape: Shape) -> dict[str, Run]:
        """Its kernel is b q.k, without the constant a; its products of fp32 are triton's default."""
        from fla.ops.linear_attn import chunk_linear_attn

        if not shape.causal:
            return {}
        name = "fla chunk_linear_attn" + ", tf32" * (shape.dtype == "float32")
        return {name: lambda: chunk_linear_attn(*inputs, scale=1.0, normalize=True)[0]}

    def state(self, shape: Shape, device: str) -> LAState:
        sizes = ((shape.D, shape.D), (shape.D,), (shape.D,))
        products, keys, values = (torch.rand(shape.B, shape.Hkv, *size, device=device) for size in sizes)
        return LAState(products, keys, values, torch.full((shape.B,), 100, device=device))


class Mamba2(Case):
    function = staticmethod(mamba2)
    memory = GLAState
    shapes = (equal_heads(8, 2048, 32, 64), *(equal_heads(1, *size, 64) for size in LONG))
    errors = tuple(equal_heads(2, 1024, 32, 64, dtype=dtype) for dtype in DTYPES)
    steps = (equal_heads(64, 1, 32, 64), equal_heads(1, 1, 32, 64))
    names = ("q", "k", "v", "g", "step", "skip")

    def inputs(self, shape: Shape, device: str) -> list[Tensor]:
        """Steps around 0.02 at a rate of 1: half-lives around 35 tokens."""
        q, k, v = random_qkv(shape, device)
        step = softplus(torch.randn(shape.B, shape.T, shape.H, device=device) - 4.0)
        skip, kind = torch.ones(shape.H, device=device), getattr(torch, shape.gates)
        return [q, k * shape.D**-0.5, v, (-step).to(kind), step.to(kind), skip]

    def fla(self, inputs: list[Tensor], shape: Shape) -> dict[str, Run]:
        """Its simple GLA is the same recurrence; dt goes into k."""
        from fla.ops.simple_gla import chunk_simple_gla

        q, k, v, g, step, _ = inputs

        def run() -> Tensor:
            return chunk_simple_gla(q, (k * step[..., None]).to(k.dtype), v, g=g, scale=1.0)[0]

        return {"fla chunk_simple_gla": partial(run)}


BLOCK = 64
# Both ways: tokens -> the grid that they are, and the blocks along its axes.
GRIDS = {4096: ((64, 64), (1, 4, 4)), 6400: ((80, 80), (1, 4, 4)), 31500: ((21, 30, 50), (3, 5, 10))}


def text(B: int, T: int, Hkv: int = 4, D: int = 64, **others: Any) -> Shape:
    return Shape(B, T, 16, Hkv, D, 32, **others)


class MHLA(Case):
    shapes = (
        text(8, 2048),
        text(8, 2048, Hkv=16),
        text(8, 2048, D=128),
        text(1, 16384),
        text(1, 131072),
        *(both_ways(*size, M) for size, M in zip(IMAGES, (16, 16, 150), strict=True)),
    )
    errors = tuple(
        shape._replace(dtype=dtype) for shape in (text(2, 1000), both_ways(2, 4096, 6, 64, 16)) for dtype in DTYPES
    )
    steps = (text(64, 1), text(1, 1))
    names = ("q", "k", "v", "w")
    torch_tokens = 140_000

    def inputs(self, shape: Shape, device: str) -> list[Tensor]:
        """Positive features, and weights of pairs of blocks around one."""
        q, k, v = random_qkv(shape, device)
        w = torch.rand(shape.Hkv, shape.M, shape.M, device=device) + 0.5
        return [q.abs(), k.abs(), v, w.to(getattr(torch, shape.gates))]

    def op(self, inputs: list[Tensor], shape: Shape, backend: Any) -> Tensor:
        if shape.causal:  # in one block alone nothing is mixed
            block_size = BLOCK if shape.T > BLOCK else 4
            return mhla(*inputs, block_size=block_size, backend=backend)[0]
        q, k, v, m = inputs
        size, blocks = GRIDS.get(shape.T, ((1, shape.T), (1, 1, shape.M)))
        return mhla_grid(q, k, v, m, place_grid(Grid(size), blocks, q), backend=backend)

    def peers(self, inputs: list[Tensor], shape: Shape, backend: str) -> dict[str, Run]:
        q, k, v, w = inputs
        if not shape.causal:
            return {"linear attention, linearize": lambda: la(q, k, v, a=0.0, causal=False)[0]}
        loop = shape.T <= 2048 and shape.T % BLOCK == 0
        return {"Python loop over blocks": partial(loop_over_blocks, q, k, v, w)} if loop else {}

    def state(self, shape: Shape, device: str) -> MHLAState:
        row = shape.Hkv, shape.D, shape.D + 1
        past = torch.rand(shape.B, shape.M - 2, *row, device=device)
        old, current, mixed = (torch.rand(shape.B, *row, device=device) for _ in range(3))
        return MHLAState(past, old, current, mixed, torch.full((shape.B,), 100, device=device))

    def step(self, inputs: list[Tensor], state: MHLAState, backend: Any) -> Any:
        return mhla(*inputs, block_size=BLOCK, state=state)


def loop_over_blocks(q: Tensor, k: Tensor, v: Tensor, w: Tensor) -> Tensor:
    """The authors' language models: a list of summaries, mixed anew for every block. [B,T,H,D] of whole blocks."""
    G = q.shape[2] // k.shape[2]
    q, k, v = (y.transpose(1, 2).repeat_interleave(g, 1) for y, g in ((q, 1), (k, G), (v, G)))
    w = w.to(q.dtype).repeat_interleave(G, 0)
    causal = torch.ones(BLOCK, BLOCK, dtype=torch.bool, device=q.device).tril()
    summaries: list[Tensor] = []
    sums: list[Tensor] = []
    outputs = []
    for i, (Q, K, V) in enumerate(zip(*(y.split(BLOCK, 2) for y in (q, k, v)), strict=True)):
        A = w[:, i, :1, None] * (Q @ K.mT).masked_fill(~causal, 0.0)
        o, g = A @ V, A.sum(-1)
        if i:
            row = w[:, i, 1 : i + 1].flip(1)
            o = o + Q @ torch.einsum("hb,bnhkv->nhkv", row, torch.stack(summaries))
            g = g + (Q * torch.einsum("hb,bnhk->nhk", row, torch.stack(sums))[:, :, None]).sum(-1)
        outputs.append(o / g[..., None])
        summaries.append(K.mT @ V)
        sums.append(K.sum(2))
    return torch.cat(outputs, 2).transpose(1, 2)


@cache
def log_decay(heads: int, device: torch.device) -> Tensor:
    """Of the paper: gamma = 1 - 2^(-5-h)."""
    return torch.log1p(-torch.exp2(-5.0 - torch.arange(heads, device=device)))


class RetNet(Case):
    memory = RetNetState
    shapes, errors, steps = SHAPES, ERRORS, STEPS
    precision = "tf32"

    def inputs(self, shape: Shape, device: str) -> list[Tensor]:
        return random_qkv(shape, device)

    def op(self, inputs: list[Tensor], shape: Shape, backend: Any, precision: Precision = "tf32") -> Tensor:
        decay = log_decay(shape.Hkv, inputs[0].device)
        return retnet(*inputs, log_decay=decay, backend=backend, precision=precision)[0]

    def fla(self, inputs: list[Tensor], shape: Shape) -> dict[str, Run]:
        from fla.ops.retention import chunk_retention

        return {"fla chunk_retention": lambda: chunk_retention(*inputs)[0]}

    def step(self, inputs: list[Tensor], state: RetNetState, backend: Any) -> Any:
        decay = log_decay(state.memory.shape[1], inputs[0].device)
        return retnet(*inputs, log_decay=decay, state=state, backend=backend)


class SAGA(Case):
    """Over `hedgehog` the features are made from q and k, otherwise q and k are positive and are features."""

    # The last four are the stages of PVT-T at 1280 px.
    shapes = (
        *(both_ways(*size) for size in IMAGES),
        both_ways(*IMAGES[0], base="hedgehog"),
        *(both_ways(16, T, H, 64, base="hedgehog") for T, H in ((102400, 1), (25600, 2), (6400, 5), (1601, 8))),
    )
    errors = tuple(both_ways(2, 4096, 6, 64, base="hedgehog", dtype=dtype) for dtype in DTYPES)
    names = ("q", "k", "v", "key_gate", "value_gate", "output_gate", "local", "query_map", "key_map")
    torch_tokens = 2_000_000

    def inputs(self, shape: Shape, device: str) -> list[Tensor]:
        """Gates as a conversion starts them, nearly open, and where there are maps, near the identity."""
        q, k, v = random_qkv(shape, device)
        if not shape.base:
            q, k = q.abs(), k.abs()
        width = shape.D if not shape.base else 2 * shape.D
        made = [q, k, v, torch.randn(*k.shape[:3], width, device=device).to(q.dtype) + 4, torch.randn_like(v) + 4]
        made += [torch.randn_like(q), torch.randn_like(v)]
        if shape.base:
            near = torch.eye(shape.D, device=device)
            made += [near + 0.05 * torch.randn(heads, *near.shape, device=device) for heads in (shape.H, shape.Hkv)]
        return made

    def op(self, inputs: list[Tensor], shape: Shape, backend: Any) -> Tensor:
        *given, local = inputs[:7]
        maps = Maps("hedgehog", shape.D**-0.5, *inputs[7:]) if shape.base else Maps()
        return saga(*given, local=local, norm="mass", maps=maps, backend=backend)


class SLA(Case):
    """The cost of its gates over each base."""

    shapes = tuple(SHAPES[0]._replace(base=base) for base in ("gla", "gdn", "retnet"))
    errors = (
        *(shape._replace(base="gla") for shape in ERRORS),
        *(ERRORS[0]._replace(base=base) for base in ("gdn", "retnet")),
    )
    steps = tuple(shape._replace(base="gla") for shape in STEPS)

    def named(self, shape: Shape) -> tuple[str, ...]:
        return (*load_case(shape.base).names, "read_scores", "write_scores")

    def inputs(self, shape: Shape, device: str) -> list[Tensor]:
        own = load_case(shape.base).inputs(shape, device)
        return [*own, *(torch.randn(shape.B, shape.T, heads, device=device) for heads in (shape.H, shape.Hkv))]

    def op(self, inputs: list[Tensor], shape: Shape, backend: Any) -> Tensor:
        base: Any = shape.base
        return sla(**_named(inputs, shape), base=base, backend=backend)[0]

    def peers(self, inputs: list[Tensor], shape: Shape, backend: Any) -> dict[str, Run]:
        bare = _named(inputs[:-2], shape)
        base: Any = shape.base
        name = f"{shape.base} alone{', PyTorch path' if backend == 'torch' else ''}"
        return {name: lambda: op_of(base)(**bare, backend=backend)[0]}

    def fla(self, inputs: list[Tensor], shape: Shape) -> dict[str, Run]:
        """Its function for the base: the gates it has not."""
        return load_case(shape.base).fla(inputs[:-2], shape)

    def state(self, shape: Shape, device: str) -> Any:
        return load_case(shape.base).state(shape, device)

    def step(self, inputs: list[Tensor], state: Any, backend: Any) -> Any:
        return sla(**_named(inputs, self.steps[0]), base="gla", state=state, backend=backend)


def _named(inputs: list[Tensor], shape: Shape) -> dict[str, Any]:
    """What the base takes, and the scores where they are given."""
    named = dict(zip(SLA().named(shape), inputs, strict=False))
    return named | {"log_decay": log_decay(shape.Hkv, inputs[0].device)} if shape.base == "retnet" else named


SINK = 1


class Window(Case):
    # A small model's training step, an 8B model's, a long row, a wide window.
    shapes = (
        Shape(16, 1024, 8, 4, 64, 64),
        Shape(8, 2048, 32, 8, 128, 64),
        Shape(1, 16384, 32, 8, 128, 64),
        Shape(8, 2048, 32, 8, 128, 512),
    )
    errors = tuple(Shape(2, 1024, 16, 4, 128, 64, dtype=dtype) for dtype in DTYPES)

    def inputs(self, shape: Shape, device: str) -> list[Tensor]:
        return random_qkv(shape, device)

    def op(self, inputs: list[Tensor], shape: Shape, backend: Any) -> Tensor:
        return window_attention(*inputs, window=shape.M, sink=SINK, scale=shape.D**-0.5, backend=backend)[0]

    def peers(self, inputs: list[Tensor], shape: Shape, backend: str) -> dict[str, Run]:
        """The same tokens seen by torch's flex_attention, compiled."""
        if backend == "torch" or shape.dtype == "float32":
            return {}
        return {"flex_attention, compiled": lambda: flex(inputs, _mask(shape.T, shape.M), shape.Hkv < shape.H)}


@cache
def _mask(T: int, W: int) -> BlockMask:
    def sees(_b: Tensor, _h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return (j <= i) & ((i - j < W) | (j < SINK))

    return create_block_mask(sees, None, None, T, T, device="cuda")


@cache
def _compiled() -> Any:
    return torch.compile(flex_attention)


def flex(inputs: list[Tensor], mask: BlockMask, grouped: bool) -> Tensor:
    """Softmax of q [B,T,H,D] over what `mask` lets it see of k, v [B,T,Hkv,D]."""
    q, k, v = (x.transpose(1, 2) for x in inputs)
    return _compiled()(q, k, v, block_mask=mask, enable_gqa=grouped).transpose(1, 2)


CASES: dict[str, type[Case]] = {
    one.__name__.lower(): one for one in (GDN, GLA, GSA, LA, Mamba2, MHLA, RetNet, SAGA, SLA, Window)
}
