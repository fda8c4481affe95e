"""The update of AdamW with moments of 8 bits as one Triton kernel; small_adamw.py has the formulas.

A program owns BLOCKS blocks of a parameter [R,C], each with a scale: it reads gradients, weights and moments once, and
writes weights and moments once. The PyTorch path goes some forty times over temporary tensors.

Letters: R rows, C columns, P blocks of a row, the last one perhaps short.
"""

# mypy: disallow-untyped-defs=False

from __future__ import annotations

import torch
from torch import Tensor

from linearize_kernels.gpu.launch import unavailable
from linearize_kernels.gpu.triton_helpers import jit, tl, triton

BLOCKS, WARPS = 8, 4
# Of ten: Philox with seven passes all tests of its paper (Salmon et al., SC 2011, table 2).
ROUNDS = 7


def fits(parameter: Tensor, gradient: Tensor) -> bool:
    """Whether the kernel can take them."""
    return not any(unavailable(x.device, x.dtype) for x in (parameter, gradient))


@jit
def update_kernel(
    weights,
    gradients,
    means,
    mean_scales,
    squares,
    square_scales,
    C,
    P,
    count,
    seed,
    size,
    keep,
    bias,
    b1,
    b2,
    eps,
    BLOCK: tl.constexpr,
    BLOCKS: tl.constexpr,
    ROUNDS: tl.constexpr,
):
    """One step on weights and gradients [R,C]; means [R,C] int8 and squares [R,C] uint8 with scales [R,P] fp32. `count`
    is R P. size = lr / (1 - b1^step), keep = 1 - lr * weight decay, bias = sqrt(1 - b2^step)."""
    block = tl.program_id(0).to(tl.int64) * BLOCKS + tl.arange(0, BLOCKS)
    real = block < count
    row = block // P
    column = (block % P)[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    own = real[:, None] & (column < C)
    place = row[:, None] * C + column

    b_g = tl.load(gradients + place, mask=own, other=0.0).to(tl.float32)
    root = tl.load(means + place, mask=own, other=0).to(tl.float32) / 127.0
    scale = tl.load(mean_scales + block, mask=real, other=0.0)
    b_m = root * tl.abs(root) * scale[:, None]
    b_m += (1.0 - b1) * (b_g - b_m)
    root = tl.load(squares + place, mask=own, other=0).to(tl.float32) / 255.0
    scale = tl.load(square_scales + block, mask=real, other=0.0)
    b_v = (root * root) * (root * root) * scale[:, None]
    b_v = b2 * b_v + (1.0 - b2) * b_g * b_g

    # Codes: sign and square root of a share of the block's largest, and a fourth root that is never 0.
    scale = tl.max(tl.abs(b_m), 1)
    share = b_m / tl.maximum(scale, 1e-38)[:, None]
    code = tl.floor(tl.sqrt(tl.abs(share)) * 127.0 + 0.5)
    code = tl.where(share < 0, -code, code)
    tl.store(means + place, code.to(tl.int8), mask=own)
    tl.store(mean_scales + block, scale, mask=real)
    scale = tl.max(b_v, 1)
    code = tl.floor(tl.sqrt(tl.sqrt(b_v / tl.maximum(scale, 1e-38)[:, None])) * 255.0 + 0.5)
    tl.store(squares + place, tl.minimum(tl.maximum(code, 1.0), 255.0).to(tl.uint8), mask=own)
    tl.store(square_scales + block, scale, mask=real)

    b_w = tl.load(weights + place, mask=own, other=0.0).to(tl.float32)
    b_w = b_w * keep - size * (b_m / (tl.sqrt(b_v) / bias + eps))
    if weights.dtype.element_ty == tl.bfloat16:
        # Up as often as the part that is lost says: noise below the last bit, and then the bits above it.
        b_row, zero = (row[:, None] + column * 0).to(tl.int32), (column * 0).to(tl.int32)
        noise, _, _, _ = tl.philox(seed, column.to(tl.int32), b_row, zero, zero, ROUNDS)
        bits = (b_w.to(tl.int32, bitcast=True) + (noise & 0xFFFF).to(tl.int32)) & -65536
        b_w = bits.to(tl.float32, bitcast=True)
    tl.store(weights + place, b_w.to(weights.dtype.element_ty), mask=own)


def update(
    weights: Tensor,
    gradients: Tensor,
    state: dict[str, Tensor],
    block: int,
    seed: int,
    numbers: tuple[float, float, float, float, float, float],
) -> None:
    """One step, in place, of contiguous weights and gradients [R,C], and of a state with codes and scales. `numbers`
    are the kernel's size, keep, bias, b1, b2 and eps."""
    C, parts = weights.shape[1], state["exp_avg_scale"].shape[1]
    count = len(weights) * parts
    moments = (state[f"{name}{part}"] for name in ("exp_avg", "exp_avg_sq") for part in ("", "_scale"))
    # Triton compiles again for a number that is 1 or a multiple of 16; a seed shall be neither.
    seed = seed % 2**30 * 2 + 3
    with torch.cuda.device_of(weights):
        update_kernel[(triton.cdiv(count, BLOCKS),)](
            weights, gradients, *moments, C, parts, count, seed, *numbers, BLOCK=block, BLOCKS=BLOCKS, ROUNDS=ROUNDS,
            num_warps=WARPS,
        )  # fmt: skip
