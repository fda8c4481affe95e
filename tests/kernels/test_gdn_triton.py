"""The Triton kernels of Gated DeltaNet against the token-by-token reference, in Triton's interpreter.

Few cases have bf16 (see triton_tools.py); the rest of it is proved on a GPU (docs/measurements/kernel-notes.md).
"""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from conftest import with_slow
from test_gdn_gpu import build, outcome
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
BASE: dict[str, Any] = {"B": 1, "T": 40, "H": 2, "Hkv": 1, "E": 1, "D": 16, "DV": 16, "dtype": "float32"}
CASES: dict[str, list[dict[str, Any]]] = {
    "sizes": [
        *({"T": T} for T in (1, 2, 31, 33, 99)),
        {"B": 2, "H": 4, "Hkv": 2, "E": 2},
        {"H": 3, "D": 20, "DV": 24},
        {"H": 4, "E": 2, "DV": 40},
        {"dtype": "bfloat16"},
        {"dtype": "float16"},
        {"dtype": "float16", "H": 4, "Hkv": 2, "E": 2, "T": 33, "heads": True},
    ],
    "gates": [
        {"heads": True, "B": 2, "H": 4, "E": 2, "D": 20, "state": True},
        {"gate": 100.0},
        {"gate": 100.0, "segments": 7, "H": 4, "E": 2, "heads": True},
        {"special": "closed"},
        {"special": "infinite"},
        {"special": "open", "state": True},
        {"special": "zero", "state": True},
        {"special": "silent", "state": True},
    ],
    "layouts": [
        {"segments": 9, "B": 2},
        {"segments": 33, "T": 80, "state": True},
        {"cu": [0, 1, 1, 36, 70], "T": 70, "state": True, "heads": True},
        {"padding": "each", "B": 3, "state": True},
    ],
    "pieces": [
        {"T": 130, "gate": 0.01, "state": True, "heads": True},
        {"T": 130, "gate": 0.01, "state": True, "segments": 70, "D": 20, "DV": 24},
        # Pieces of several chunks, of which the last few count.
        {"T": 190, "gate": 20.0, "state": True, "E": 2, "DV": 40},
        {"T": 130, "gate": 0.01, "state": True, "cu": [0, 1, 130], "H": 1},
        {"T": 99, "gate": 0.01, "state": True, "padding": "left", "dtype": "float16", "H": 1},
        {"T": 99, "special": "infinite", "state": True, "H": 1},
    ],
    "step": [
        {"T": 1, "step": True},
        {"T": 1, "step": True, "padding": "left", "B": 2, "H": 4, "E": 2, "D": 20, "DV": 24},
        {"T": 1, "step": True, "heads": True, "state": True, "H": 4, "E": 2},
    ],
}


@pytest.mark.parametrize("group", with_slow(CASES, "layouts", "pieces", "sizes"))
def test_kernels_match_the_reference(group: str) -> None:
    assert complaints(compare, CASES[group], TOLERANCE) == []


@pytest.mark.slow
def test_operators_compile_checkpoint_and_count() -> None:
    interpreted(check_operators)


# ---------------------------------------------------------------- compiled for real, without a GPU


def compiled(name: str, capability: int, shared: int, D: int) -> Any:
    """A kernel as bf16 inputs have it on a GPU with so much shared memory; `sums` and `back_sums` are the first
    launches of scan and back where they cut rows, `turned` is join for gradients."""
    from linearize_kernels.gdn import backward as gdn_triton_bwd
    from linearize_kernels.gdn import forward as gdn_triton
    from linearize_kernels.gdn.launch import choose

    what = {"sums": "scan", "back_sums": "back", "turned": "join"}.get(name, name)
    kernel = getattr(gdn_triton, f"{what}_kernel", None) or getattr(gdn_triton_bwd, f"{what}_kernel")
    c = choose((capability // 10, capability % 10), shared, 132, D, D, torch.bfloat16)
    how = getattr(c, "join" if what == "join" else name)
    values = {"G": 1, "D": D, "DV": D, "C": c.chunk_size, "LEVELS": (c.chunk_size // 8).bit_length() - 1}
    values |= {"BK": how.columns, "BV": c.block_dv if name == "key" else how.columns, "PREC": c.precision}
    values |= dict.fromkeys(("VARLEN", "SEGMENTS", "READ", "WRITE", "START", "LAST"), False)
    values |= {"BD": c.block_d, "BITS": c.bits, "REVERSE": name == "turned"}
    absent = ["p_seg", "p_chunks", "p_rows", "p_cu", "p_gate", "p_read", "p_write", "p_S0", "p_S1", "p_dS1", "p_dS0"]
    if name in ("sums", "back_sums"):
        absent += ["p_S", "p_dS", "p_e", "p_e_low", "p_dx", "p_dx_low"]
    elif what != "join":
        absent += ["p_A", "p_M", "p_M_low", "p_dead"]
    half = ("p_q", "p_k", "p_v", "p_o", "p_do", "p_dq", "p_dk", "p_S", "p_dS", "p_e", "p_dx", "p_Te", "p_M")
    half = (*half, *(f"{name}_low" for name in ("p_e", "p_dx", "p_Te", "p_M")))
    kinds = {"scale": "fp32"} | dict.fromkeys(half, "*bf16") | {"p_dead": "*i32"}
    if what == "join":
        kinds["p_S"] = "*fp32"
    return compile_kernel(kernel, capability, values | dict.fromkeys(absent), kinds, how.warps, how.stages)


# The first launches of scan and back differ from the second in what they store; one GPU says enough of them.
ONCE, TWICE = ("sums", "back_sums"), ("scan", "join", "turned", "output", "back", "key")


@pytest.mark.parametrize(
    ("name", "capability", "kilobytes"),
    [*((name, 80, 99) for name in TWICE), *((name, 90, 227) for name in (*TWICE, *ONCE))],
)
def test_no_product_takes_the_transpose_of_a_product_and_all_fit(name: str, capability: int, kilobytes: int) -> None:
    """triton 3.4 to 3.7 miscompile some dot(trans(x)) on Hopper where x comes out of a dot; ours never does."""
    kernel = compiled(name, capability, kilobytes * 1024, 128)
    assert ("tt.trans" not in kernel.asm["ttir"]) if name in ("join", "turned") else transposed_products(kernel) == []
    assert kernel.metadata.shared <= kilobytes * 1024


def test_rows_are_cut_where_heads_are_few() -> None:
    from linearize_kernels.gdn.launch import choose

    config = choose((9, 0), 232448, 132, 128, 128, torch.bfloat16)
    asked = [(16, 256), (16, 1024), (16, 16), (4, 256), (40, 256)]
    assert [config.pieces(*sizes, 128) for sizes in asked] == [8, 8, 4, 33, 3]
    assert [config.pieces(*sizes, 128) for sizes in [(128, 32), (48, 256), (16, 11), (1, 1)]] == [1, 1, 1, 1]
    assert config.pieces(1, 4096, 128) == 64
    # What joins pieces keeps a whole M.
    assert choose((9, 0), 232448, 132, 256, 256, torch.bfloat16).pieces(16, 256, 256) == 1


def test_sizes_that_do_not_fit_are_told() -> None:
    from linearize_kernels.gdn.launch import safe

    assert safe(48 * 1024, 64, 64, torch.bfloat16).chunk_size == 32
    with pytest.raises(ValueError, match=r"256.*128.*16384"):
        safe(16 * 1024, 256, 128, torch.float32)


# ---------------------------------------------------------------- in the interpreter


def sequences_apart(cu: list[int], state: Any, **rows: torch.Tensor) -> tuple[torch.Tensor, Any]:
    """The reference for sequences laid end to end."""
    from linearize_kernels.gdn.gdn import naive_gdn
    from linearize_kernels.layers.pool import each_sequence

    return each_sequence(naive_gdn, torch.tensor(cu), state, **rows)


def compare(case: dict[str, Any]) -> dict[str, float]:
    from linearize_kernels.gdn.gdn import gdn, naive_gdn

    full = BASE | case
    leaves, sent = build(full)
    layout = masks(full, full["B"], full["T"])
    op = partial(gdn, backend="triton", **layout)
    exact = partial(sequences_apart, case["cu"]) if "cu" in case else partial(naive_gdn, **layout)
    wanted = not case.get("step")
    ours = outcome(full, [x.clone().requires_grad_(wanted) for x in leaves], sent, op)
    reference = outcome(full, [x.double().requires_grad_(wanted) for x in leaves], sent, exact)
    return largest_errors(ours, reference)


def check_operators() -> None:
    """torch.library's own checks, fullgraph compilation, gradient checkpointing, flop counts."""
    from linearize_kernels.gdn.gdn import gdn
    from linearize_kernels.gdn.launch import chunked_op, step_op

    leaves, _ = build(BASE | {"T": 9, "heads": True, "state": True})
    *rows, S = (x.requires_grad_() for x in leaves)
    torch.library.opcheck(chunked_op, (*rows, 0.25, None, None, S))
    torch.library.opcheck(step_op, (*(x[:, :1].detach() for x in rows), 0.25, None, S.detach()))

    def loss(*inputs: torch.Tensor) -> torch.Tensor:
        return gdn(*inputs, backend="triton")[0].square().sum()

    state, query = 2 * 64 * (16 + 16) + 4 * 16 * 16, 2 * 64 * (16 + 16) + 2 * 16 * 16
    assert flops_whichever_way(loss, rows[:5]) == 9 * (3 * (state + 2 * query) + state)
