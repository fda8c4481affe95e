"""Logit KL by its Triton kernels against the formula in float64, in Triton's interpreter.

On a GPU: `python tests/test_losses_triton.py gpu` prints errors in bf16 and times of kernels and of PyTorch.
"""

from __future__ import annotations

import time
from typing import Any

import torch
from torch import Tensor
from triton_tools import compile_kernel, interpreted

# Unset: B2 T3 V1000 tau 1; `banned` is the vocabulary's part that both models rule out, `turned` valid [T,B] in memory.
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
TOLERANCE = {"float32": 2e-6, "float16": 1e-3, "bfloat16": 8e-3}


def test_kernels_give_the_loss_and_gradient_of_the_formula() -> None:
    for case in CASES:
        loss, gradient = interpreted(errors, case, "cpu")
        most = TOLERANCE[case.get("dtype", "float32")]
        assert loss <= most, case  # nan is not
        assert gradient <= most, case


def test_kernels_compile_for_a_gpu() -> None:
    from linearize.losses_triton import LOWEST, WARPS, gradient_kernel, rows_kernel

    kinds = dict.fromkeys(("weight", "factor", "kl", "lse_s", "lse_t"), "*fp32") | {"c": "fp32"}
    kinds |= dict.fromkeys(("student", "teacher", "grad"), "*bf16")
    for kernel in (rows_kernel, gradient_kernel):
        assert compile_kernel(kernel, 90, {"LOW": LOWEST, "BLOCK": 4096}, kinds, WARPS).asm["ptx"]


def errors(case: dict[str, Any], device: str, shape: tuple[int, int] = (2, 3)) -> tuple[float, float]:
    """Of the loss, and of the gradient over its largest entry."""
    from linearize.losses import logit_kl
    from linearize.losses_triton import fits

    generator, V = torch.Generator().manual_seed(0), case.get("V", 1000)
    student, teacher = (case.get("scale", 3.0) * torch.randn(*shape, V, generator=generator) for _ in range(2))
    valid = torch.ones(shape, dtype=torch.bool)
    for logits in (student, teacher)[: 2 if "banned" in case else 0]:
        logits[..., : case["banned"]] = -torch.inf
    if "invalid" in case:
        valid[0, 1], student[0, 1] = False, torch.nan
    valid = valid.T.contiguous().T if "turned" in case else valid
    student, teacher = (y.to(device, getattr(torch, case.get("dtype", "float32"))) for y in (student, teacher))
    assert fits(student, teacher)
    found = []
    for wide in (False, True):
        inputs = [y.double() if wide else y for y in (student, teacher)]
        inputs[0].requires_grad_()
        loss = logit_kl(*inputs, valid.to(device), temperature=case.get("tau", 1.0), num_tokens=7.0)
        (gradient,) = torch.autograd.grad(3 * loss, inputs[0])
        found.append((loss.detach().double(), gradient.double()))
    (loss, gradient), (expected, slope) = found
    return relative(loss, expected), relative(gradient, slope)


def relative(found: Tensor, expected: Tensor) -> float:
    return float((found - expected).abs().max() / expected.abs().max().clamp_min(1e-6))


def on_gpu() -> None:
    from linearize.losses import logit_kl

    for case in CASES:
        case = {**case, "dtype": "bfloat16"}
        print(case, errors(case, "cuda"), flush=True)
    for tokens, V in ((16384, 8192), (4096, 128256)):
        student, teacher = (torch.randn(1, tokens, V, device="cuda", dtype=torch.bfloat16) for _ in range(2))
        valid, student = torch.ones(1, tokens, dtype=torch.bool, device="cuda"), student.requires_grad_()
        for name, chunk in (("kernels", None), ("PyTorch", max(1, (1 << 24) // tokens))):
            for repeat in range(13):
                if repeat == 3:
                    torch.cuda.synchronize()
                    torch.cuda.reset_peak_memory_stats()
                    began = time.perf_counter()
                logit_kl(student, teacher, valid, chunk=chunk).backward()
                student.grad = None
            torch.cuda.synchronize()
            ms, peak = (time.perf_counter() - began) * 100, torch.cuda.max_memory_allocated() / 2**20
            print(f"{tokens} tokens, {V} words, {name}: {ms:.2f} ms forward and backward, {peak:.0f} MiB", flush=True)


if __name__ == "__main__":
    on_gpu()
