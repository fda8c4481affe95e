"""What an operator makes of its arguments before it computes: whether they fit together, and which path takes them."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

Backend = Literal["auto", "triton", "torch"]


def check_shapes(
    q: Tensor, k: Tensor, v: Tensor, E: int, padding: Tensor | None, segments: Tensor | None, cu: Tensor | None,
    **others: tuple[Tensor | None, str],
)-> None:  # fmt: skip
    """Raise ValueError, with the shapes found, unless the arguments of an operator with E memories a row fit together.

    q [B,T,H,D], k [B,T,Hkv,D], v [B,T,Hkv,Dv], Hkv | E | H; `padding` and `segments` [B,T]; `cu` (cu_seqlens) with B=1
    and neither. `others` come with the letters of their shapes, of which B, T, H, E and D are those above.
    """
    (B, T, H, D), Hkv = q.shape, k.shape[2]
    shapes = f"q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)}"
    if k.shape != (B, T, Hkv, D) or v.shape[:3] != (B, T, Hkv):
        raise ValueError(f"q, k, v must be [B,T,heads,dim] with equal B, T and key dim, found {shapes}")
    if H % E or E % Hkv:
        raise ValueError(f"KV heads must divide state heads, and those query heads, found {Hkv}, {E} and {H}")
    sizes = {"B": B, "T": T, "H": H, "E": E, "D": D}
    for name, (given, letters) in {**others, "padding": (padding, "BT"), "segments": (segments, "BT")}.items():
        if given is None:
            continue
        wanted = tuple(sizes.get(x, n) for x, n in zip(letters, given.shape, strict=False))
        if given.ndim != len(letters) or given.shape != wanted:
            raise ValueError(f"{name} must be [{','.join(letters)}], found {tuple(given.shape)} beside {shapes}, E={E}")
    if cu is not None and (B != 1 or padding is not None or segments is not None):
        raise ValueError(f"cu_seqlens needs B=1 and neither padding nor segments, found B={B}")


def several(cu: Tensor | None) -> Tensor | None:
    """cu_seqlens where there are several sequences: one alone is a row like any other."""
    return None if cu is None or len(cu) == 2 else cu


def to_gate_heads(y: Tensor, E: int) -> Tensor:
    """[B,T,Hkv,D] -> [B,T,E,D]: memories of one KV head share its keys."""
    return y if y.shape[2] == E else y.repeat_interleave(E // y.shape[2], dim=2)


def state_dtype(q: Tensor) -> torch.dtype:
    return torch.float64 if q.dtype == torch.float64 else torch.float32


def use_kernels(backend: str, obstacle: str) -> bool:
    """Whether the Triton kernels run; `obstacle` is why they cannot, empty when they can.

    Raises ValueError where `triton` is asked for and they cannot.
    """
    if backend == "triton" and obstacle:
        raise ValueError(f"backend='triton' cannot run here: {obstacle}; use backend='auto'")
    return backend != "torch" and not obstacle


def wants_gradients(*leaves: Tensor | None) -> bool:
    return torch.is_grad_enabled() and any(y is not None and y.requires_grad for y in leaves)
