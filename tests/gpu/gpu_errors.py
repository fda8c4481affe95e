"""What the checks of GPU kernels share: their errors beside the PyTorch path's, and how large they may be.

A file tests/test_NAME_gpu.py has BASE, CASES and `results(case, backend, exact)`: output, last states and every
gradient by name. It is skipped without a GPU; as a script it prints the errors and needs no pytest.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

Case = dict[str, Any]
Results = Callable[[Case, Any, bool], dict[str, Tensor]]
# The kernels' error over the PyTorch path's; a floor for what fp32 sums cost in another order, in units of the
# reference's norm; gates in fp32 beside inputs in half precision, where 16 bits of each factor are kept.
FACTOR, FLOOR, FLOOR_GATES = 1.5, 2e-6, 5e-5
# With `rounded`: kernels that round computed factors to bf16 once, several in a row. SDPA's flash kernel, which
# rounds its weights, has 2.0e-3 for o and 2.3e-3 to 2.5e-3 for gradients (T 1000 and 2048, heads of 64 and 128, H100).
# Gradients of gates, whose sums cancel, and memories have bounds of their own (measured 1.1e-3 and 1.8e-3 at most).
ROUNDED, ROUNDED_GATES, ROUNDED_MEMORIES = 3.5e-3, 1.5e-3, 2.5e-3
MEMORIES = ("keys", "values", "dkeys", "dvalues")


def masks(case: Case) -> dict[str, Tensor]:
    """`segments` of so many tokens, of each row elsewhere, `cu_seqlens` from `cu`, left `padding` of the first row."""
    made, B, T = {}, case["B"], case["T"]
    if "segments" in case:
        place = torch.arange(T, device="cuda") + 7 * torch.arange(B, device="cuda")[:, None]
        made["segments"] = place // case["segments"]
    if "cu" in case:
        made["cu_seqlens"] = torch.tensor(case["cu"], dtype=torch.int32, device="cuda")
    if "padding" in case:
        made["padding"] = torch.arange(T, device="cuda").expand(B, T) >= torch.tensor([[T // 3], [0]]).cuda()
    return made


def queries(case: Case, device: str = "cuda") -> list[Tensor]:
    """q, k, v and the gradient of o, in fp32, the same at each call."""
    torch.manual_seed(0)
    heads = (("H", "D"), ("Hkv", "D"), ("Hkv", "DV"), ("H", "DV"))
    return [torch.randn(case["B"], case["T"], case[count], case[size], device=device) for count, size in heads]


def special_gates(case: Case, g: Tensor) -> Tensor:
    """g, or with `special` all closed, all open, or infinite at every seventh token."""
    if case.get("special") == "infinite":
        g[:, ::7] = -torch.inf
    return {"closed": torch.full_like(g, -1e4), "open": torch.zeros_like(g)}.get(str(case.get("special")), g)


def with_the_rest(case: Case, leaves: list[Tensor], do: Tensor, last: float) -> tuple[list[Tensor], list[Tensor]]:
    """Leaves with both gates of `heads` and a memory (`state`); and what arrives, `last` times randn at the memory."""
    B, T, H, E, device = *(case[name] for name in ("B", "T", "H", "E")), do.device
    memory = len(case["cu"]) - 1 if "cu" in case else B, E, case["D"], case["DV"]
    if case.get("heads"):
        leaves = [*leaves, *(2 * torch.rand(B, T, count, device=device) for count in (H, E))]
    if case.get("state"):
        leaves = [*leaves, torch.randn(memory, device=device)]
    return leaves, [do, last * torch.randn(memory, device=device)]


def errors(results: Results, case: Case) -> dict[str, tuple[float, float]]:
    """name -> relative error of the kernels, which `auto` must choose, and of the PyTorch path."""
    exact, ours, torchs = results(case, "torch", True), results(case, "auto", False), results(case, "torch", False)
    for name, again in results(case, "triton", False).items():
        assert torch.equal(ours[name], again), f"{name} differs between two runs"
    out = {}
    for name, value in exact.items():
        scale = value.norm().clamp_min(0.1 * value.numel() ** 0.5)
        out[name] = tuple(float((x[name].double() - value).norm() / scale) for x in (ours, torchs))
    return out


def allowed(case: Case, name: str, torchs: float) -> float:
    """`case` with its dtype; one with `gates` has them in its own dtype; `rounded` (above, or a bound for all but
    memories), `slack` and `factor`."""
    mixed = (
        case["dtype"] != "float32" and name not in ("o", "dq", "dk", "dv") and not (name == "dg" and "gates" in case)
    )
    bound: float = case.get("factor", FACTOR) * torchs + (FLOOR_GATES * case.get("slack", 1) if mixed else FLOOR)
    rounded = case.get("rounded", 0.0)
    if rounded is True:
        rounded = ROUNDED_GATES if name == "dg" else ROUNDED
    return max(bound, min(rounded, ROUNDED_MEMORIES) if name in MEMORIES else rounded)


def complaints(results: Results, base: Case, case: Case) -> list[str]:
    found = errors(results, base | case)
    return [f"{n}: {a:.1e} against {b:.1e}" for n, (a, b) in found.items() if not a <= allowed(base | case, n, b)]


def checked(module: str, results: Results, base: Case, cases: list[Case]) -> Any:
    """The test of every case in a file of that `__name__`; where that is run as a script, its output instead."""
    if module == "__main__":
        return main(results, base, cases)
    import pytest

    @pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
    @pytest.mark.parametrize("case", cases, ids=json.dumps)
    def test(case: Case) -> None:
        assert complaints(results, base, case) == []

    return test


def main(results: Results, base: Case, cases: list[Case]) -> None:
    """Print a line per case: all of them, or with two arguments every n-th from the first."""
    for case in cases[int(sys.argv[1]) :: int(sys.argv[2])] if len(sys.argv) > 2 else cases:
        try:
            found = errors(results, base | case)
        except Exception as error:
            print(json.dumps(case), "FAILED", str(error)[:200], flush=True)
            continue
        bad = [n for n, (a, b) in found.items() if not a <= allowed(base | case, n, b)]
        cells = " ".join(f"{n} {a:.1e}/{b:.1e}" for n, (a, b) in found.items())
        print(json.dumps(case), "BAD" if bad else "ok", *bad, "|", cells, flush=True)
