"""Logit KL, cross entropy and square errors by Triton kernels against the formulas in float64, in Triton's interpreter.

On a GPU: `python tests/train/test_losses_triton.py gpu` prints errors in bf16 and times of kernels and of PyTorch.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from triton_tools import compile_kernel, interpreted

# Unset: B2 T3 V1000 tau 1; `banned` is the vocabulary's part that both models rule out, `turned` valid and targets
# [T,B] in memory. Cross entropy has no tau.
CASES: list[dict[str, Any]] = [
    {},
    {"tau": 2.0},
    {"V": 1},
    {"V": 4096},
    {"V": 9001, "tau": 0.7},
    {"banned": 5},
    {"scale": 300.0},
    {"invalid": True},
    {"invalid": True, "turned": True},
    {"dtype": "float16"},
]
CASES = [{"loss": loss, **case} for loss in ("kl", "ce") for case in CASES]
TOLERANCE = {"float32": 2e-6, "float16": 1e-3, "bfloat16": 8e-3}


def test_kernels_give_the_loss_and_gradient_of_the_formula() -> None:
    for case in CASES:
        loss, gradient = interpreted(errors, case, "cpu")
        most = TOLERANCE[case.get("dtype", "float32")]
        assert loss <= most, case  # nan is not
        assert gradient <= most, case


def test_square_errors_are_those_of_the_formula() -> None:
    for dtype in ("float32", "float16", "bfloat16"):
        for masked in (False, True):
            found = interpreted(square_errors, dtype, masked, "cpu", (2, 3, 3, 40))
            assert max(found) <= TOLERANCE[dtype], (dtype, masked)
    # More numbers a token than a program takes at once.
    assert max(interpreted(square_errors, "float32", True, "cpu", (1, 2, 9, 512))) <= TOLERANCE["float32"]


def test_what_is_not_finite_shows() -> None:
    assert interpreted(strange) == ["inf", "nan", "nan", "nan"]


def test_kernels_compile_for_a_gpu() -> None:
    from linearize.train.losses_triton import (
        LOWEST,
        WARPS,
        error_gradient_kernel,
        error_kernel,
        gradient_kernel,
        nll_gradient_kernel,
        nll_kernel,
        rows_kernel,
    )

    kinds = dict.fromkeys(("weight", "factor", "kl", "loss", "lse", "lse_s", "lse_t"), "*fp32") | {"c": "fp32"}
    kinds |= dict.fromkeys(("student", "teacher", "logits", "grad"), "*bf16") | {"targets": "*i64"}
    for kernel in (rows_kernel, gradient_kernel, nll_kernel, nll_gradient_kernel):
        assert compile_kernel(kernel, 90, {"LOW": LOWEST, "BLOCK": 4096}, kinds, WARPS).asm["ptx"]

    kinds |= {"valid": "*u8", "error": "*fp32", "factor": "*fp32"}
    for kernel in (error_kernel, error_gradient_kernel):
        assert compile_kernel(kernel, 90, {"MASKED": True, "BLOCK": 4096}, kinds, WARPS).asm["ptx"]


def square_errors(dtype: str, masked: bool, device: str, shape: tuple[int, ...]) -> tuple[float, float]:
    """Of the sum, and of the gradient over its largest entry; student and teacher lie in memory as [B,H,T,D]."""
    from linearize.train.losses import square_error

    torch.manual_seed(0)
    student, teacher = (torch.randn(*shape).transpose(1, 2).contiguous().transpose(1, 2) for _ in range(2))
    valid = None
    if masked:
        valid = torch.rand(shape[:2]) > 0.3
        valid[0, 0] = False
        student[~valid], teacher[~valid] = torch.nan, torch.inf
    found = []
    student, teacher = (y.to(device, getattr(torch, dtype)) for y in (student, teacher))
    valid = None if valid is None else valid.to(device)
    for wide in (False, True):
        inputs = [y.double() if wide else y for y in (student, teacher)]
        inputs[0].requires_grad_()
        total = square_error(*inputs, valid)
        (gradient,) = torch.autograd.grad(3 * total, inputs[0])
        found.append((total.detach().double(), gradient.double()))
    (total, gradient), (expected, slope) = found
    return relative(total, expected), relative(gradient, slope)


def errors(case: dict[str, Any], device: str, shape: tuple[int, int] = (2, 3)) -> tuple[float, float]:
    """Of the loss, and of the gradient over its largest entry."""
    from linearize.train.losses import IGNORED, cross_entropy, logit_kl
    from linearize.train.losses_triton import fits

    generator, V = torch.Generator().manual_seed(0), case.get("V", 1000)
    student, teacher = (case.get("scale", 3.0) * torch.randn(*shape, V, generator=generator) for _ in range(2))
    targets = torch.randint(case.get("banned", 0), V, shape, generator=generator)
    valid = torch.ones(shape, dtype=torch.bool)
    for logits in (student, teacher)[: 2 if "banned" in case else 0]:
        logits[..., : case["banned"]] = -torch.inf
    if "invalid" in case:
        valid[0, 1], student[0, 1], targets[0, 1] = False, torch.nan, IGNORED
    valid, targets = (y.T.contiguous().T if "turned" in case else y for y in (valid, targets))
    student, teacher = (y.to(device, getattr(torch, case.get("dtype", "float32"))) for y in (student, teacher))
    valid, targets = valid.to(device), targets.to(device)
    assert fits(student, teacher)
    found = []
    for wide in (False, True):
        inputs = [y.double() if wide else y for y in (student, teacher)]
        inputs[0].requires_grad_()
        if case["loss"] == "kl":
            loss = logit_kl(*inputs, valid, temperature=case.get("tau", 1.0), num_tokens=7.0)
        else:
            loss = cross_entropy(inputs[0], targets, num_tokens=7.0)
        (gradient,) = torch.autograd.grad(3 * loss, inputs[0])
        found.append((loss.detach().double(), gradient.double()))
    (loss, gradient), (expected, slope) = found
    return relative(loss, expected), relative(gradient, slope)


def strange() -> list[str]:
    """Cross entropy of a target that is ruled out, of those outside the vocabulary, and of logits with a NaN."""
    from linearize.train.losses import cross_entropy

    ruled_out, broken = torch.zeros(2, 1, 1, 7)
    ruled_out[..., 3], broken[..., 2] = -torch.inf, torch.nan
    cases = [(ruled_out, 3), (ruled_out, 7), (ruled_out, -1), (broken, 3)]
    return [str(cross_entropy(x, torch.tensor([[target]])).item()) for x, target in cases]


def relative(found: Tensor, expected: Tensor) -> float:
    return float((found - expected).abs().max() / expected.abs().max().clamp_min(1e-6))


def on_gpu() -> None:
    bad = 0
    for case in CASES:
        case = {**case, "dtype": "bfloat16"}
        found = errors(case, "cuda")
        ok = all(error <= TOLERANCE["bfloat16"] for error in found)  # nan is not
        bad += not ok
        print("ok " if ok else "BAD", case, *(f"{x:.1e}" for x in found), flush=True)
    for masked in (False, True):
        found = square_errors("bfloat16", masked, "cuda", (2, 100, 32, 128))
        ok = max(found) <= TOLERANCE["bfloat16"]
        bad += not ok
        print("ok " if ok else "BAD", "square error", masked, *(f"{x:.1e}" for x in found), flush=True)
    for tokens, V in ((16384, 8192), (4096, 128256)):
        compare_times(tokens, V, max(1, (1 << 24) // tokens))
    sys.exit(f"{bad} of {len(CASES)} BAD" if bad else 0)


def compare_times(tokens: int, V: int, chunk: int) -> None:
    from linearize.train.losses import cross_entropy, logit_kl

    student, teacher = (torch.randn(1, tokens, V, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    valid, student = torch.ones(1, tokens, dtype=torch.bool, device="cuda"), student.requires_grad_()
    targets = torch.randint(V, (1, tokens), device="cuda")
    losses: dict[str, Callable[[int | None], Tensor]] = {
        "kl": lambda chunk: logit_kl(student, teacher, valid, chunk_size=chunk),
        "ce": lambda chunk: cross_entropy(student, targets, chunk_size=chunk),
    }
    for loss, function in losses.items():
        for name, chunked in (("kernels", None), ("PyTorch", chunk)):
            for repeat in range(13):
                if repeat == 3:
                    torch.cuda.synchronize()
                    torch.cuda.reset_peak_memory_stats()
                    began = time.perf_counter()
                function(chunked).backward()
                student.grad = None
            torch.cuda.synchronize()
            ms, peak = (time.perf_counter() - began) * 100, torch.cuda.max_memory_allocated() / 2**20
            what = f"{loss}, {tokens} tokens, {V} words, {name}"
            print(f"{what}: {ms:.2f} ms forward and backward, {peak:.0f} MiB", flush=True)


if __name__ == "__main__":
    on_gpu()
