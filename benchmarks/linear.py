"""What `linearize bench kernels` does not show of linear attention and retention on a GPU: learned slopes, unit vectors
found in the kernels, and gates as they are given, without SLA's softmax. Time and peak memory.

python -m benchmarks.linear
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from linearize.bench.timing import peak_mib, queued
from linearize_kernels.la.la import la
from linearize_kernels.retnet.retnet import retnet

Run = Callable[[], Tensor]


def show(name: str, run: Run, leaves: list[Tensor], do: Tensor) -> None:
    """Forward without gradients; forward + backward."""

    def both() -> None:
        torch.autograd.grad(run(), leaves, do)

    with torch.no_grad():
        forward, memory = queued(run)["ms"], peak_mib(run, 0)
    ms, peak = queued(both)["ms"], peak_mib(both, 0)
    print(f"{name:32} {forward:8.3f} {ms:8.3f} ms {memory:7.0f} {peak:7.0f} MiB", flush=True)


def inputs(B: int, T: int, H: int, D: int) -> tuple[list[Tensor], Tensor]:
    torch.manual_seed(0)
    *leaves, do = (torch.randn(B, T, H, D, device="cuda", dtype=torch.bfloat16) for _ in range(4))
    return [x.requires_grad_() for x in leaves], do


def main() -> None:
    x, do = inputs(8, 2048, 16, 128)
    decay = torch.log1p(-torch.exp2(-5.0 - torch.arange(16, device="cuda")))
    show("retnet", lambda: retnet(*x, log_decay=decay)[0], x, do)
    gates = [torch.rand(8, 2048, 16, device="cuda").requires_grad_() for _ in range(2)]
    gated = {"read_gate": gates[0], "write_gate": gates[1]}
    show("retnet, both gates", lambda: retnet(*x, log_decay=decay, **gated)[0], [*x, *gates], do)
    x, do = inputs(4, 10_000, 16, 128)
    show("la", lambda: la(*x)[0], x, do)
    slopes = [torch.full((16,), value, device="cuda").requires_grad_() for value in (1.0, 0.9)]
    show("la, a and b learned", lambda: la(*x, a=slopes[0], b=slopes[1])[0], [*x, *slopes], do)
    show("la, unit vectors", lambda: la(*x, unit=True)[0], x, do)


if __name__ == "__main__":
    main()
