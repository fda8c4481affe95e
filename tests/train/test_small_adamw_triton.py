"""The small AdamW's update by a Triton kernel against its PyTorch path, in Triton's interpreter.

On a GPU: `python tests/train/test_small_adamw_triton.py gpu` prints errors, and times of kernel and of PyTorch.
"""

from __future__ import annotations

import sys
import time
from typing import Any
from unittest import mock

import torch
from triton_tools import compile_kernel, interpreted

# Rows of whole blocks, of short ones, and shorter than a block; what the last program has too many of.
SHAPES = [(16, 256), (5, 1000), (70, 60), (4, 16, 64), (3, 3000)]
STEPS = 3
# Of weights by norm: kernel and PyTorch round a moment to another code now and then, which the next step sees. In
# bfloat16 they draw other random numbers, and each step may end in the last bit.
WEIGHTS = {"float32": 1e-5, "bfloat16": STEPS * 2**-8}


def test_the_kernel_makes_the_step_of_the_formulas() -> None:
    for shape in SHAPES:
        for dtype in ("float32", "bfloat16"):
            found = interpreted(errors, shape, dtype, "cpu")
            assert found["weights"] <= WEIGHTS[dtype], (shape, dtype, found)
            assert found["different"] <= 1e-3, (shape, dtype, found)
            assert found["scales"] <= 1e-4, (shape, dtype, found)


def test_rounding_keeps_the_mean_and_follows_the_seed() -> None:
    up, mean, same, other = interpreted(rounding, "cpu")
    assert up == [1.0, 1.0 + 2**-7]
    assert abs(mean - (1.0 + 2**-10)) < 5e-5
    assert same
    assert not other


def test_what_is_not_a_matrix_takes_pytorch() -> None:
    assert interpreted(launches) == 1


def test_the_kernel_compiles_for_a_gpu() -> None:
    from linearize.train.small_adamw import BLOCK
    from linearize.train.small_adamw_triton import BLOCKS, ROUNDS, WARPS, update_kernel

    kinds = {"gradients": "*bf16", "means": "*i8", "squares": "*u8", "mean_scales": "*fp32", "square_scales": "*fp32"}
    kinds |= dict.fromkeys(("size", "keep", "bias", "b1", "b2", "eps"), "fp32")
    for dtype in ("*bf16", "*fp32"):
        constants = {"BLOCK": BLOCK, "BLOCKS": BLOCKS, "ROUNDS": ROUNDS}
        compiled = compile_kernel(update_kernel, 90, constants, kinds | {"weights": dtype}, WARPS)
        assert compiled.asm["ptx"]


def made(shape: tuple[int, ...], dtype: str, device: str) -> tuple[Any, list[torch.Tensor]]:
    """A parameter, and its gradients of some steps."""
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(shape, generator=generator).to(device, getattr(torch, dtype))
    size = 10 ** torch.empty(shape).uniform_(-4, 0, generator=generator)
    gradients = [(size * torch.randn(shape, generator=generator)).to(device, weight.dtype) for _ in range(STEPS)]
    return torch.nn.Parameter(weight), gradients


def errors(shape: tuple[int, ...], dtype: str, device: str) -> dict[str, float]:
    """Of weights and scales by norm, and the share of codes that differ. By how much says little: a sum near 0 of two
    terms that cancel changes by many codes where one of them changes by one."""
    from linearize.train import small_adamw_triton
    from linearize.train.small_adamw import SmallAdamW

    runs = []
    for by_kernel in (True, False):
        parameter, gradients = made(shape, dtype, device)
        assert small_adamw_triton.fits(parameter, gradients[0])
        optimizer = SmallAdamW([parameter], lr=1e-2, weight_decay=0.1)
        with mock.patch.object(small_adamw_triton, "fits", return_value=by_kernel):
            for gradient in gradients:
                parameter.grad = gradient.clone()
                optimizer.step()
        runs.append((parameter.detach(), optimizer.state[parameter]))
    (ours, our_state), (theirs, their_state) = runs
    codes = [our_state[name] != their_state[name] for name in ("exp_avg", "exp_avg_sq")]
    scales = [relative(our_state[f"{name}_scale"], their_state[f"{name}_scale"]) for name in ("exp_avg", "exp_avg_sq")]
    return {
        "weights": relative(ours.float(), theirs.float()),
        "different": max(float(x.float().mean()) for x in codes),
        "scales": max(scales),
    }


def relative(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found - expected).norm() / expected.norm())


def rounding(device: str) -> tuple[list[float], float, bool, bool]:
    """Weights of 1 that one step moves by a fraction of their last bit: the values there are, their mean, whether the
    same seed makes the same weights, and another seed does."""
    from linearize.train.small_adamw import SmallAdamW

    def step(seed: int) -> torch.Tensor:
        parameter = torch.nn.Parameter(torch.ones(400, 256, dtype=torch.bfloat16, device=device))
        parameter.grad = -torch.ones_like(parameter)
        SmallAdamW([parameter], lr=2**-10, seed=seed).step()
        return parameter.detach().float()

    found = step(1)
    values, mean = sorted(set(found.flatten().tolist())), float(found.double().mean())
    return values, mean, torch.equal(found, step(1)), torch.equal(found, step(2))


def launches() -> int:
    """How often the kernel is taken for a matrix, a vector, a small matrix and one in float64."""
    from linearize.train import small_adamw_triton
    from linearize.train.small_adamw import SmallAdamW

    shapes: list[tuple[tuple[int, ...], torch.dtype]] = [((64, 64), torch.float32), ((8192,), torch.float32)]
    shapes += [((32, 32), torch.float32), ((64, 64), torch.float64)]
    parameters = [torch.nn.Parameter(torch.ones(shape, dtype=dtype)) for shape, dtype in shapes]
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    with mock.patch.object(small_adamw_triton, "update") as update:
        SmallAdamW(parameters, lr=1e-3).step()
    return update.call_count


def on_gpu() -> None:
    bad = 0
    for shape in [*SHAPES, (4096, 4096), (1000, 14336)]:
        for dtype in ("float32", "bfloat16"):
            found = errors(shape, dtype, "cuda")
            ok = found["weights"] <= WEIGHTS[dtype] and found["different"] <= 1e-3 and found["scales"] <= 1e-4
            bad += not ok
            print("ok " if ok else "BAD", shape, dtype, *(f"{name} {x:.1e}" for name, x in found.items()), flush=True)
    print("rounding", *rounding("cuda"), flush=True)
    compare_times()
    sys.exit(f"{bad} BAD" if bad else 0)


def compare_times() -> None:
    from linearize.train import small_adamw_triton
    from linearize.train.small_adamw import SmallAdamW

    for dtype in ("bfloat16", "float32"):
        weight = torch.randn(14336, 4096, device="cuda", dtype=getattr(torch, dtype))
        parameters = [torch.nn.Parameter(weight.clone()) for _ in range(8)]
        for parameter in parameters:
            parameter.grad = torch.randn_like(parameter)
        for by_kernel in (True, False):
            optimizer = SmallAdamW(parameters, lr=1e-4)
            with mock.patch.object(small_adamw_triton, "fits", return_value=by_kernel):
                for repeat in range(8):
                    if repeat == 3:
                        torch.cuda.synchronize()
                        began = time.perf_counter()
                    optimizer.step()
                torch.cuda.synchronize()
            ms = (time.perf_counter() - began) * 200
            what = "kernel" if by_kernel else "PyTorch"
            print(f"{dtype}, {sum(p.numel() for p in parameters) / 1e6:.0f} M numbers, {what}: {ms:.2f} ms", flush=True)


if __name__ == "__main__":
    on_gpu()
