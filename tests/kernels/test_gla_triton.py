"""The Triton kernels of GLA against the token-by-token reference, in Triton's interpreter.

Few cases have bf16 (see triton_tools.py); the rest of it is proved on a GPU (docs/measurements/kernel-notes.md).
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from conftest import with_slow
from triton_tools import (
    compile_kernel,
    complaints,
    flops_whichever_way,
    interpreted,
    largest_errors,
    masks,
    transposed_products,
)

# Largest error over the largest reference value.
TOLERANCE = {"float32": 2e-5, "float16": 2e-3, "bfloat16": 1e-2}

# group -> cases; unset sizes are B1 T40 H2 Hkv1 E1 D16 Dv16
CASES: dict[str, list[dict[str, Any]]] = {
    "sizes": [
        *({"T": T} for T in (1, 2, 31, 33, 99)),
        {"B": 2, "H": 4, "Hkv": 2, "E": 2},
        {"H": 3, "D": 20, "DV": 24},
        {"H": 4, "E": 2, "DV": 40},
        {"B": 2, "Hkv": 2, "E": 2, "DV": 40, "T": 99},
        {"dtype": "bfloat16"},
        {"dtype": "float16"},
        {"dtype": "float16", "H": 4, "Hkv": 2, "E": 2, "T": 99, "heads": True},
    ],
    "gates": [
        {"heads": True, "B": 2, "H": 4, "E": 2, "D": 20, "state": True},
        {"heads": True, "H": 2, "E": 2, "cu": [0, 1, 1, 71], "T": 71},
        {"heads": True, "H": 1, "cu": [0, 260, 260, 290], "T": 290, "state": True},
        {"gate": 40.0, "T": 99, "state": True},
        {"gate": 40.0, "segments": 7, "H": 4, "E": 2, "heads": True},
        # All of dg cancels.
        {"special": "closed", "slack": 5},
        {"special": "infinite", "T": 99, "state": True},
        {"special": "open", "state": True},
        {"special": "zero", "state": True},
    ],
    "layouts": [
        {"segments": 9, "B": 2},
        {"segments": 33, "T": 80, "state": True},
        {"segments": 90, "T": 129, "state": True, "heads": True, "dtype": "float16"},
        {"cu": [0, 1, 1, 36, 70], "T": 70, "state": True, "heads": True},
        {"padding": "each", "B": 3, "state": True, "T": 150},
    ],
    "step": [
        {"T": 1, "step": True},
        {"T": 1, "step": True, "padding": "left", "B": 2, "H": 4, "E": 2, "D": 20, "DV": 24},
        {"T": 1, "step": True, "heads": True, "state": True, "H": 4, "E": 2},
    ],
}


@pytest.mark.parametrize("group", with_slow(CASES, "gates", "sizes"))
def test_kernels_match_the_reference(group: str) -> None:
    assert complaints(compare, CASES[group], TOLERANCE) == []


def test_operators_compile_checkpoint_and_count() -> None:
    interpreted(check_operators)


def test_cpu_tensors_take_pytorch_unless_told_otherwise() -> None:
    from linearize_kernels.gla.gla import gla

    q, k, g = torch.randn(1, 5, 2, 16), torch.randn(1, 5, 1, 16), -torch.rand(1, 5, 1, 16)
    assert torch.equal(gla(q, k, k, g)[0], gla(q, k, k, g, backend="torch")[0])
    with pytest.raises(ValueError, match="on cpu"):
        gla(q, k, k, g, backend="triton")


def test_rows_are_cut_where_heads_are_few() -> None:
    from linearize_kernels.gla.launch import choose

    config = choose((9, 0), 232448, 132, 128, torch.bfloat16)
    asked = [(32, 256), (32, 2048), (32, 20), (16, 32), (88, 256)]
    assert [config.pieces(*sizes) for sizes in asked] == [8, 8, 5, 8, 3]
    assert [config.pieces(*sizes) for sizes in [(256, 32), (89, 256), (32, 11), (32, 1)]] == [1, 1, 1, 1]


# ---------------------------------------------------------------- compiled for real, without a GPU


def compiled(name: str, capability: int, config: Any, D: int, **changed: Any) -> Any:
    """A kernel compiled with a configuration."""
    from linearize_kernels.gla import backward as gla_triton_bwd
    from linearize_kernels.gla import forward as gla_triton
    from linearize_kernels.gla.launch import constants

    kernel = getattr(gla_triton if hasattr(gla_triton, name) else gla_triton_bwd, name)
    how = getattr(config, name.split("_")[1])
    values = (
        constants(config, how, 1, D, D) | dict.fromkeys(("VARLEN", "SEGMENTS", "REVERSE", "GIVEN"), False) | changed
    )
    absent = [key for key in kernel.arg_names if key.startswith(("p_r", "p_seg", "p_chunks", "p_S0", "p_sum"))]
    half = ("p_q", "p_k", "p_v", "p_o", "p_do", "p_dq", "p_dk", "p_x", "p_y", "p_z")
    kinds = {"scale": "fp32", "scale_x": "fp32", "scale_y": "fp32"}
    kinds |= dict.fromkeys(half, "*bf16" if config.precision == "parts" else "*fp32")
    return compile_kernel(kernel, capability, values | dict.fromkeys(absent), kinds, how.warps, how.stages)


KERNELS = ("gla_scan_kernel", "gla_mix_kernel", "gla_key_kernel")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("name", with_slow(KERNELS, "gla_key_kernel"))
def test_safe_configurations_fit_every_gpu(name: str, dtype: torch.dtype) -> None:
    from linearize_kernels.gla.launch import safe

    assert compiled(name, 80, safe(dtype), 128).metadata.shared <= 48 * 1024


@pytest.mark.parametrize("name", with_slow(KERNELS[1:], "gla_mix_kernel"))  # the scan has no transposes at all
def test_no_product_takes_the_transpose_of_a_product(name: str) -> None:
    """triton 3.4 to 3.7 miscompile some dot(trans(x)) on Hopper where x comes out of a dot; ours never does."""
    from linearize_kernels.gla.launch import choose

    config = choose((9, 0), 232448, 132, 128, torch.bfloat16)
    for reverse in (False, True):
        assert transposed_products(compiled(name, 90, config, 128, REVERSE=reverse)) == []


# ---------------------------------------------------------------- in the interpreter


def build(case: dict[str, Any]) -> dict[str, Any]:
    """Random inputs of one case."""
    torch.manual_seed(0)
    size = {"B": 1, "T": 40, "H": 2, "Hkv": 1, "E": 1, "D": 16, "DV": 16, **case}
    B, T, H, E, D, DV = (size[x] for x in ("B", "T", "H", "E", "D", "DV"))
    dtype = getattr(torch, case.get("dtype", "float32"))
    shapes = ((H, D), (size["Hkv"], D), (size["Hkv"], DV), (H, DV))
    q, k, v, do = (torch.randn(B, T, *shape).to(dtype) for shape in shapes)
    g = torch.nn.functional.logsigmoid(2 * torch.randn(B, T, E, D) + 1) / 4 * case.get("gate", 1.0)
    special = case.get("special")
    g = {"closed": torch.full_like(g, -1e4), "open": torch.zeros_like(g)}.get(special, g)
    if special == "infinite":
        g[:, ::5] = -torch.inf
    if special == "zero":
        q, k = 0 * q, 0 * k
    rows = len(case["cu"]) - 1 if "cu" in case else B
    inputs = {"q": q, "k": k, "v": v, "g": g}
    if case.get("heads"):
        inputs |= {"read_gate": 2 * torch.rand(B, T, H), "write_gate": 2 * torch.rand(B, T, E)}
    if case.get("state"):
        inputs["memory"] = torch.randn(rows, E, D, DV)
    return {
        "inputs": inputs,
        "sent": (do, torch.randn(rows, E, D, DV)),
        "masks": masks(case, B, T),
    }


def results(case: dict[str, Any], made: dict[str, Any], reference: bool) -> dict[str, torch.Tensor]:
    """Output, last memory and every gradient, by the float64 reference or by the kernels."""
    from linearize_kernels.gla.gla import GLAState, gla, naive_gla

    def leaf(x: torch.Tensor) -> torch.Tensor:
        return (x.double() if reference else x).clone().requires_grad_(not case.get("step"))

    leaves = {name: leaf(x) for name, x in made["inputs"].items()}
    tokens = {name: x for name, x in leaves.items() if name != "memory"}
    state = GLAState(leaves["memory"]) if "memory" in leaves else None
    layout = dict(made["masks"])
    cu = layout.pop("cu_seqlens", None) if reference else None
    if not reference:
        o, last = gla(**tokens, **layout, state=state, backend="triton")
    elif cu is None:
        o, last = naive_gla(**tokens, **layout, state=state)
    else:
        bounds, parts = case["cu"], []
        for n in range(len(bounds) - 1):
            own = None if state is None else GLAState(state.memory[n : n + 1])
            parts.append(naive_gla(**{y: x[:, bounds[n] : bounds[n + 1]] for y, x in tokens.items()}, state=own))
        o, last = torch.cat([part[0] for part in parts], 1), GLAState(torch.cat([part[1].memory for part in parts]))
    out = {"o": o, "last": last.memory}
    if not case.get("step"):
        loss = sum((x.double() * y.double()).sum() for x, y in zip(out.values(), made["sent"], strict=True))
        gradients = torch.autograd.grad(loss, list(leaves.values()))
        out |= {f"d{name}": gradient for name, gradient in zip(leaves, gradients, strict=True)}
    return out


def compare(case: dict[str, Any]) -> dict[str, float]:
    made = build(case)
    return largest_errors(results(case, made, False), results(case, made, True))


def check_operators() -> None:
    """torch.library's own checks, fullgraph compilation, gradient checkpointing, flop counts."""
    from linearize_kernels.gla.gla import gla
    from linearize_kernels.gla.launch import chunked_op, step_op

    made = build({"T": 9, "state": True, "heads": True})["inputs"]
    q, k, v, g, read, write, S = (x.requires_grad_() for x in made.values())
    torch.library.opcheck(chunked_op, (q, k, v, g, 0.25, None, None, S, read, write))
    one = [x[:, :1].detach() for x in (q, k, v, g)]
    torch.library.opcheck(step_op, (*one, 0.25, None, S.detach(), read[:, :1].detach(), None))

    def loss(*inputs: torch.Tensor) -> torch.Tensor:
        return gla(*inputs, backend="triton")[0].square().sum()

    forward, backward = 2 * 64 * (16 + 16) + 4 * 16 * 16, 2 * 64 * (3 * 16 + 2 * 16) + 10 * 16 * 16
    assert flops_whichever_way(loss, (q, k, v, g)) == 9 * 2 * (forward + backward)
