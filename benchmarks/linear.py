"""Linear attention and retention on a GPU beside softmax (SDPA) on the same inputs: time and peak memory.

python -m benchmarks.linear
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import normalize, scaled_dot_product_attention

from linearize.bench_measure import peak_mib
from linearize_kernels.la import la
from linearize_kernels.retnet import retnet

Run = Callable[[], Tensor]


def median_ms(run: Callable[[], object], times: int = 10) -> float:
    """Of queued runs, after two that are not counted."""
    for _ in range(2):
        run()
    torch.cuda.synchronize()
    events = [torch.cuda.Event(enable_timing=True) for _ in range(times + 1)]
    torch.cuda._sleep(20_000_000)  # meanwhile the CPU queues them all
    events[0].record()
    for event in events[1:]:
        run()
        event.record()
    torch.cuda.synchronize()
    return sorted(a.elapsed_time(b) for a, b in pairwise(events))[times // 2]


def show(name: str, run: Run, leaves: list[Tensor], do: Tensor) -> None:
    """Forward without gradients; forward + backward."""

    def both() -> None:
        torch.autograd.grad(run(), leaves, do)

    with torch.no_grad():
        forward, memory = median_ms(run), peak_mib(run, 0)
    print(f"{name:32} {forward:8.3f} {median_ms(both):8.3f} ms {memory:7.0f} {peak_mib(both, 0):7.0f} MiB", flush=True)


def inputs(B: int, T: int, H: int, D: int, dtype: torch.dtype, unit: bool = True) -> tuple[list[Tensor], Tensor]:
    torch.manual_seed(0)
    q, k, v, do = (torch.randn(B, T, H, D, device="cuda") for _ in range(4))
    if unit:
        q, k = normalize(q, dim=-1), normalize(k, dim=-1)
    return [x.to(dtype).requires_grad_() for x in (q, k, v)], do.to(dtype)


def softmax(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    backend = SDPBackend.EFFICIENT_ATTENTION if q.dtype == torch.float32 else SDPBackend.FLASH_ATTENTION
    with sdpa_kernel([backend]):
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        return scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)


def main() -> None:
    for dtype in (torch.bfloat16, torch.float32):
        x, do = inputs(4, 10_000, 16, 128, dtype)
        show(f"la {dtype}", lambda x=x: la(*x, backend="triton")[0], x, do)
        show(f"softmax {dtype}", lambda x=x: softmax(*x), x, do)
    x, do = inputs(8, 2048, 16, 128, torch.bfloat16, unit=False)
    decay = torch.log1p(-torch.exp2(-5.0 - torch.arange(16, device="cuda")))
    show("retnet", lambda: retnet(*x, log_decay=decay)[0], x, do)
    gates = [torch.rand(8, 2048, 16, device="cuda").requires_grad_() for _ in range(2)]
    gated = {"read_gate": gates[0], "write_gate": gates[1]}
    show("retnet, both gates", lambda: retnet(*x, log_decay=decay, **gated)[0], [*x, *gates], do)
    for B, T, H, D in ((32, 4096, 6, 64), (16, 6400, 3, 64), (1, 31500, 12, 128)):
        y, dy = inputs(B, T, H, D, torch.bfloat16)
        show(f"la both ways B{B} T{T} H{H} D{D}", lambda y=y: la(*y, causal=False)[0], y, dy)
    x, do = inputs(4, 10_000, 16, 128, torch.bfloat16, unit=False)
    slopes = [torch.full((16,), value, device="cuda").requires_grad_() for value in (1.0, 0.9)]
    show("la, a and b learned", lambda: la(*x, a=slopes[0], b=slopes[1])[0], [*x, *slopes], do)
    show("la, unit vectors", lambda: la(*x, unit=True)[0], x, do)


if __name__ == "__main__":
    main()
