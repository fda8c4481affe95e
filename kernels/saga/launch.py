"""SAGA on the GPU, host side: configurations, scratch, launches and the registered operator."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..gpu.launch import Problem, launch, scratch, strides, unavailable, width
from ..gpu.operators import operator, own_namespace
from ..gpu.target import obstacle_of, target
from .kernels import keys_kernel, output_kernel, queries_kernel, summary_kernel

# Of the normaliser, which positive features and gates keep above it.
GUARD = 1e-6


class Tiles(NamedTuple):
    """Of one kernel: tokens of a chunk, warps, buffers for what the loop loads."""

    chunk_size: int
    warps: int
    stages: int


class Config(NamedTuple):
    """Tiles of every kernel, and how many programs a row is cut for."""

    summary: Tiles
    output: Tiles
    queries: Tiles
    keys: Tiles
    programs: int
    precision: str


# (capability, width of both dims, features, dtype) -> tiles that differ from `safe`. Measured: one H200.
SHIPPED: dict[tuple[tuple[int, int], int, str, torch.dtype], dict[str, Any]] = {
    ((9, 0), 64, "hedgehog", torch.bfloat16): {"summary": Tiles(32, 4, 2), "keys": Tiles(64, 4, 1)},
}


def safe(shared: int, processors: int, D: int, DV: int, feature_map: str, dtype: torch.dtype) -> Config:
    """The largest tiles whose kernels need no more than `shared` bytes. Raises ValueError when the smallest do not fit.

    Chunks of 64 beside narrower heads would go wrong through Hopper's wgmma, and so would fp32 (mhla/launch.py).
    """
    exact, narrow = dtype == torch.float32, min(width(D), width(DV)) < 64
    warps = 4 if max(D, DV) <= 64 else 8
    for tiles in (*(Tiles(C, warps, stages) for C in (64, 32) for stages in (2, 1)), Tiles(16, 4, 1)):
        if tiles.chunk_size == 64 and (exact or narrow or max(D, DV) > 128):
            continue
        if shared_bytes(tiles, D, DV, feature_map, dtype) <= shared:
            return Config(tiles, tiles, tiles, tiles, 4 * processors, "bf16x6" if exact else "bf16x3")
    raise ValueError(f"{D} features with head dim {DV} need more than {shared} bytes of shared memory")


def shared_bytes(tiles: Tiles, D: int, DV: int, feature_map: str, dtype: torch.dtype) -> int:
    """Bound on the shared memory of every kernel, from the compiler's reports for 8.0 and 9.0: what a pipelined loop
    loads, computed factors, states and maps, each also transposed, and sums over warps."""
    BD, BV, halves = width(D), width(DV), 2 if feature_map == "hedgehog" else 1
    item = 4 if dtype == torch.bfloat16 else 8
    loads = (tiles.stages - 1) * tiles.chunk_size * ((1 + halves) * BD + 4 * BV) * dtype.itemsize
    sums = 4 * tiles.warps * max(BD, BV)
    states = 2 * halves * BD * BV + 2 * (halves - 1) * BD * BD
    return loads + sums + item * (states + halves * tiles.chunk_size * (BD + BV) // 2)


@functools.cache
def configure(device: torch.device, dtype: torch.dtype, D: int, DV: int, feature_map: str) -> Config:
    """The configuration for these inputs. Raises ValueError where nothing fits."""
    gpu = target(device)
    if gpu is None:
        small = Tiles(16, 4, 1)
        return Config(small, small, small, small, 6, "ieee")
    config, size = safe(gpu.shared, gpu.processors, D, DV, feature_map, dtype), width(max(D, DV))
    shipped = SHIPPED.get((gpu.capability, size, feature_map, dtype), {}) if width(D) == width(DV) else {}
    return config._replace(**shipped)


obstacle = obstacle_of(configure)


def runs_on(device: torch.device, dtype: torch.dtype, D: int, DV: int, feature_map: str) -> str:
    """Why the kernels cannot take such inputs; empty when they can."""
    if reason := unavailable(device, dtype):
        return reason
    if feature_map not in ("identity", "elu", "hedgehog"):
        return f"features {feature_map}"
    widest = 64 if feature_map == "hedgehog" else 128
    if widest < D or DV > 128:
        return f"{D} channels or head dim {DV} exceed {widest} and 128"
    return obstacle(device, dtype, D, DV, feature_map)


class Call(NamedTuple):
    """The inputs of the operator."""

    q: Tensor
    k: Tensor
    v: Tensor
    key_gate: Tensor
    value_gate: Tensor
    output_gate: Tensor
    local: Tensor | None
    query_map: Tensor | None
    key_map: Tensor | None
    weight: Tensor | None
    padding: Tensor | None
    feature_map: str
    scale: float
    norm: str


def state_width(D: int, DV: int, feature_map: str, norm: str) -> int:
    """Numbers of one head's state: S [F,Dv], and z [F] where a mass divides."""
    return (2 if feature_map == "hedgehog" else 1) * D * (DV + (norm == "mass"))


class SAGAProblem(Problem):
    def __init__(self, call: Call) -> None:
        super().__init__(call)
        self.key_gate, self.value_gate, self.output_gate = (x.contiguous() for x in call[3:6])
        self.local = None if call.local is None else call.local.contiguous()
        maps: Any = [None if x is None else x.float().contiguous() for x in (call.query_map, call.key_map, call.weight)]
        self.query_map, self.key_map, self.norm = maps
        self.real = None if call.padding is None else call.padding.contiguous().view(torch.uint8)
        if call.norm == "count":
            self.norm = self._counts()
        self.E, self.W = call.k.shape[2], state_width(self.D, self.DV, call.feature_map, call.norm)
        self.config = configure(call.q.device, call.q.dtype, self.D, self.DV, call.feature_map)

    def _counts(self) -> Tensor:
        """1 / real tokens of each row, [B]."""
        B, T = self.call.q.shape[:2]
        if self.call.padding is None:
            return self.new(B).fill_(1.0 / T)
        return self.call.padding.sum(1).clamp_min(1).float().reciprocal()

    def like(self, x: Tensor) -> Tensor:
        return scratch(x, *x.shape, dtype=x.dtype)

    def stretches(self, tiles: Tiles, heads: int) -> tuple[int, int]:
        """How many, and tokens of each, a multiple of a chunk."""
        wanted = max(1, self.config.programs // (self.B * heads))
        L = -(-self.T // (wanted * tiles.chunk_size)) * tiles.chunk_size
        return -(-self.T // L), L

    def launch(self, kernel: Any, tiles: Tiles, heads: tuple[int, ...], *arguments: Any, **more: Any) -> None:
        """Run a kernel for so many heads; `arguments` end with strides."""
        N, L = self.stretches(tiles, heads[0])
        launch(
            kernel, (self.B * heads[0], N), *arguments, self.T, L, *heads, num_warps=tiles.warps,
            PHI=self.call.feature_map, NORM=self.call.norm, LOCAL=self.local is not None, PADDED=self.real is not None,
            D=self.D, DV=self.DV, W=self.W, BD=width(self.D), BV=width(self.DV), C=tiles.chunk_size, GUARD=GUARD,
            HALF=self.q.dtype == torch.bfloat16, FINE=self.call.feature_map == "identity" or self.call.norm == "head",
            PREC=self.config.precision, STAGES=tiles.stages, **more,
        )  # fmt: skip

    def room(self, tiles: Tiles, heads: int, *shape: int, wanted: bool = True) -> Tensor:
        """For what each stretch of a kernel finds: [stretches, B * heads, ...]; nothing where it is not wanted."""
        return self.new(self.stretches(tiles, heads)[0], self.B * heads, *shape) if wanted else self.new(0)

    def summed(self, heads: int, left: Tensor, right: Tensor, left_gate: Tensor | None, right_gate: Tensor | None,
               weight: Tensor | None, once: Tensor | None = None, mass: Tensor | None = None,
               total: Tensor | None = None) -> Tensor:  # fmt: skip
        """What stretches add to S and z, or with no `left_gate` to their gradients: [stretches, B * heads, W]. A single
        stretch goes into `total`."""
        tiles = self.config.summary
        alone = self.stretches(tiles, heads)[0] == 1
        S = total[None] if alone and total is not None else self.room(tiles, heads, self.W)
        self.launch(
            summary_kernel, tiles, (heads,), left, right, left_gate, right_gate, weight, self.real, once, mass, S,
            self.call.scale, *strides(left, right), BACK=left_gate is None,
        )  # fmt: skip
        return S

    def queries_gradients(self, do: Tensor, S: Tensor, y: Tensor) -> tuple[Tensor, ...]:
        """Of q, output gate, local, W of stretches, w; and R, r [B*E,W]."""
        tiles, G, norm, local = self.config.queries, self.H // self.E, self.call.norm, self.local
        dq, dog, dlocal = self.like(self.q), self.like(self.output_gate), self.new(0)
        if local is not None:  # query heads of one memory share its convolution
            dlocal = self.new(*do.shape, dtype=local.dtype if G == 1 else torch.float32)
        dW = self.room(tiles, self.H, self.D, self.D, wanted=self.call.query_map is not None)
        dweight = self.room(tiles, self.H, self.DV, wanted=norm == "head")
        dn = self.new(*do.shape) if norm == "head" else None
        once, mass = (self.new(*do.shape[:3]) if norm == "mass" else None for _ in range(2))
        self.launch(
            queries_kernel, tiles, (self.H, self.E), self.q, self.output_gate, local, S, self.query_map, self.norm,
            self.real, y, do, dq, dog, dlocal, dn, once, mass, dW, dweight, self.call.scale, *strides(self.q),
        )  # fmt: skip
        once = self.norm if norm == "count" else once
        R = self.summed(self.H, self.q, do if dn is None else dn, None, self.output_gate, self.query_map, once, mass)
        R = R.view(-1, self.B * self.E, G, self.W).sum((0, 2))
        if local is not None and G > 1:
            dlocal = dlocal.unflatten(2, (self.E, G)).sum(3).to(local.dtype)
        if self.call.weight is not None:
            dweight = dweight.view(-1, self.H, self.DV).sum(0).to(self.call.weight.dtype)
        return dq, dog, dlocal, dW, dweight, R

    def maps_gradient(self, parts: Tensor, weight: Tensor | None) -> Tensor:
        """Of W [heads,D,D], from its transposes of stretches and rows; empty where there is none."""
        if weight is None:
            return parts
        return parts.view(-1, self.B, *weight.shape).sum((0, 1)).mT.to(weight.dtype).contiguous()


def results(x: Call) -> tuple[Tensor, ...]:
    """Room for o [B,T,H,Dv]; for the backward pass S and z [B*E,W], and before the norm of a head y [B,T,H,Dv], else
    empty."""
    (B, T, H, D), E, DV = x.q.shape, x.k.shape[2], x.v.shape[3]
    S = scratch(x.q, B * E, state_width(D, DV, x.feature_map, x.norm))
    return scratch(x.q, B, T, H, DV, dtype=x.v.dtype), S, scratch(x.q, *((B, T, H, DV) if x.norm == "head" else (0,)))


def forward(call: Call, o: Tensor, S: Tensor, y: Tensor) -> None:
    x = SAGAProblem(call)
    parts = x.summed(x.E, x.k, x.v, x.key_gate, x.value_gate, x.key_map, total=S)
    if len(parts) > 1:
        torch.sum(parts, 0, out=S)
    x.launch(
        output_kernel, x.config.output, (x.H, x.E), x.q, x.output_gate, x.local, S, x.query_map, x.norm, x.real, y, o,
        x.call.scale, *strides(x.q),
    )  # fmt: skip


def backward(call: Call, do: Tensor, S: Tensor, y: Tensor) -> tuple[Tensor | None, ...]:
    """Gradients of the ten first inputs."""
    x, do = SAGAProblem(call), do.contiguous()
    dq, dog, dlocal, dW, dweight, R = x.queries_gradients(do, S, y)
    dk, dv, dkg, dvg = (x.like(y) for y in (x.k, x.v, x.key_gate, x.value_gate))
    dWk = x.room(x.config.keys, x.E, x.D, x.D, wanted=x.call.key_map is not None)
    x.launch(
        keys_kernel, x.config.keys, (x.E,), x.k, x.v, x.key_gate, x.value_gate, R, x.key_map, x.real, dk, dv, dkg, dvg,
        dWk, x.call.scale, *strides(x.k, x.v),
    )  # fmt: skip
    maps = (x.maps_gradient(*pair) for pair in ((dW, x.call.query_map), (dWk, x.call.key_map)))
    return dq, dk, dv, dkg, dvg, dog, dlocal, *maps, dweight


def flops(x: Any) -> tuple[int, int]:
    """What tokens add, what they read, and their maps; backward two products for each of those, and the output's
    again."""
    (B, T, H, D), E, DV, two = x.q, x.k[2], x.v[-1], x.feature_map == "hedgehog"
    forward = 2 * B * T * (E + H) * D * ((1 + two) * DV + two * D)
    return forward, 5 * forward // 2


NAMESPACE = own_namespace(__name__, "saga")
saga_op = operator(
    NAMESPACE, "saga", Call, results, forward, "o | S y", kept="S y", backward=backward,
    leaves="q k v key_gate value_gate output_gate local query_map key_map weight", flops=flops,
)  # fmt: skip
