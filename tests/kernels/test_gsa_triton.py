"""The Triton kernels of GSA against the token-by-token reference, in Triton's interpreter.

Few cases have bf16 (see triton_tools.py); the rest of it is proved on a GPU (docs/measurements/kernel-notes.md).
"""

from __future__ import annotations

import shutil
from types import SimpleNamespace
from typing import Any
from unittest import mock

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

# group -> cases; unset sizes are B1 T40 H2 Hkv1 E1 D16 Dv16 M16
CASES: dict[str, list[dict[str, Any]]] = {
    "lengths": [{"T": T} for T in (1, 32, 33, 70)],
    "heads_and_sizes": [
        {"H": 4, "Hkv": 2, "E": 2, "DV": 32},
        {"H": 3, "Hkv": 1, "E": 1, "D": 20, "DV": 24},
        {"H": 4, "Hkv": 1, "E": 2, "M": 20},
    ],
    "half_precision": [{"dtype": "float16", "H": 4, "Hkv": 2, "E": 2, "T": 33}],
    "states": [{"state": True}, {"state": True, "T": 65, "H": 2, "Hkv": 2, "E": 2}],
    "strong_gates": [{"gate": 40.0, "segments": 7}, {"special": "closed"}, {"special": "infinite"}],
    "open_gates": [{"special": "open", "state": True}, {"special": "zero", "state": True}],
    # Logits of thousands carry the rounding of fp32 into the softmax.
    "huge_logits": [{"special": "huge", "slack": 10}],
    "segments": [{"segments": 9, "B": 2}, {"segments": 33, "T": 80, "state": True}],
    "sequences": [{"cu": [0, 1, 1, 36, 70], "T": 70, "state": True}, {"cu": [0, 70], "T": 70}],
    "padding": [{"padding": "each", "B": 3, "state": True}],
    "sweep": [
        {"sweep": 1, "E": 2, "Hkv": 1, "M": 32, "T": 70},
        {"sweep": 1, "E": 2, "Hkv": 2, "D": 32, "DV": 32, "T": 32, "state": True, "padding": "left"},
    ],
    "sweep_in_pieces": [
        {"sweep": 4, "E": 2, "T": 70, "state": True},
        {"sweep": 4, "E": 2, "T": 70, "state": True, "chunk": 16},
        {"sweep": 8, "E": 2, "T": 70, "segments": 33, "B": 2},
        {"sweep": 1, "E": 2, "T": 70, "segments": 3, "B": 2, "state": True},
        {"sweep": 8, "E": 2, "Hkv": 1, "T": 90, "segments": 20, "state": True, "chunk": 16},
    ],
    "sweep_in_steps": [
        {"sweep": 1, "E": 2, "gate": 40.0, "segments": 7},
        {"sweep": 4, "E": 2, "T": 70, "gate": 40.0, "segments": 19, "state": True},
        # All of dg cancels: 2.9e-6 is left of terms of 10.
        {"sweep": 4, "H": 1, "E": 1, "T": 40, "special": "closed", "slack": 2},
        {"sweep": 4, "H": 1, "E": 1, "T": 70, "special": "infinite", "state": True},
    ],
    # Sequences are the pieces of a row; an empty one keeps its memory.
    "sweep_of_sequences": [
        {"sweep": 1, "E": 2, "cu": [0, 1, 1, 36, 70], "T": 70, "state": True, "chunk": 16},
        {"sweep": 1, "E": 2, "Hkv": 1, "cu": [0, 32, 50], "T": 50, "gate": 40.0, "chunk": 16},
    ],
    # Computed factors are rounded once.
    "sweep_in_bf16": [
        {"sweep": 1, "E": 2, "Hkv": 1, "M": 32, "T": 70, "dtype": "bfloat16"},
        {"sweep": 8, "E": 2, "T": 70, "segments": 33, "B": 2, "dtype": "bfloat16"},
        {"sweep": 1, "E": 2, "T": 40, "gate": 40.0, "segments": 19, "state": True, "dtype": "bfloat16"},
    ],
    # Where slots are overwritten, little of dg is left of what it is computed from.
    "sweep_of_turns": [{"sweep": 4, "E": 2, "M": 32, "T": 70, "special": "turns", "dtype": "bfloat16"}],
    # One program for both memories of a head, row by row or sequence by sequence.
    "walk": [
        {"walk": 4, "E": 2, "B": 2, "T": 70, "state": True},
        {"walk": 4, "E": 2, "Hkv": 2, "cu": [0, 1, 1, 36, 70], "T": 70, "state": True},
        {"walk": 4, "E": 2, "M": 32, "T": 70, "gate": 40.0},
        {"walk": 4, "E": 2, "cu": [0, 32, 50], "T": 50, "special": "infinite", "state": True},
        {"walk": 4, "E": 2, "T": 70, "dtype": "bfloat16", "gate": 40.0, "state": True},
    ],
    "step": [{"T": 1, "step": True}, {"T": 1, "step": True, "padding": "left", "B": 2, "H": 4, "E": 2, "M": 20}],
}


SLOW = ("heads_and_sizes", "segments", "sequences", "states", "strong_gates")
SLOW += ("walk", "sweep", "sweep_in_pieces", "sweep_of_sequences", "sweep_in_steps", "sweep_in_bf16")


@pytest.mark.parametrize("group", with_slow(CASES, *SLOW))
def test_kernels_match_the_reference(group: str) -> None:
    assert complaints(compare, CASES[group], TOLERANCE) == []


@pytest.mark.slow
def test_operators_compile_checkpoint_and_count() -> None:
    interpreted(check_operators)


def test_cpu_tensors_take_pytorch_unless_told_otherwise() -> None:
    from linearize_kernels.gsa.gsa import gsa

    q, g = torch.randn(1, 5, 2, 16), -torch.rand(1, 5, 1, 16)
    k = torch.randn(1, 5, 1, 16)
    assert torch.equal(gsa(q, k, k, g)[0], gsa(q, k, k, g, backend="torch")[0])
    with pytest.raises(ValueError, match="on cpu"):
        gsa(q, k, k, g, backend="triton")


# ---------------------------------------------------------------- compiled for real, without a GPU


def compiled(name: str, capability: int, **overrides: Any) -> Any:
    """A kernel compiled with the configuration in `overrides`."""
    from linearize_kernels.gsa import backward as gsa_triton_bwd
    from linearize_kernels.gsa import forward as gsa_triton

    kernel = getattr(gsa_triton, name, None) or getattr(gsa_triton_bwd, name)
    constants = {"VARLEN": False, "SEGMENTS": False, "SHARE": 1, "p_seg": None, "p_chunks": None}
    constants |= {key: overrides[key] for key in overrides if key.isupper()}
    half = ("p_q", "p_k", "p_v", "p_o", "p_do", "p_dq", "p_x", "p_y", "p_dy")
    kinds = {"scale": "fp32", **dict.fromkeys(half, "*bf16")}
    return compile_kernel(kernel, capability, constants, kinds, overrides["warps"], overrides["stages"])


def overrides_for(config: Any, M: int, D: int) -> dict[str, Any]:
    return {
        "C": config.chunk_size,
        "LEVELS": config.chunk_size.bit_length() - 1,
        "M": M,
        "D": D,
        "DV": D,
        "BM": config.block_m,
        "BD": config.block_d,
        "BDV": config.block_dv,
        "RANGE": config.range,
        "STACK": config.stack,
        "HOLD": config.hold,
        "PREC": config.precision,
        "warps": config.warps * config.stack,
    }


# KiB of shared memory, slots, channels of a head.
BUDGETS = [(48, 64, 64), (64, 64, 64), (100, 64, 64), (100, 64, 128), (164, 64, 128), (164, 128, 64), (227, 64, 128)]


@pytest.mark.parametrize("sizes", with_slow(BUDGETS, *BUDGETS[1:]), ids=str)
def test_safe_configurations_fit_their_budget(sizes: tuple[int, int, int]) -> None:
    from linearize_kernels.gsa.config import choose

    budget, M, D = sizes
    config = choose((8, 7), budget * 1024, M, D, D, torch.bfloat16)
    capability = 90 if budget > 164 else 80
    for name in ("logits_kernel", "key_kernel"):
        kernel = compiled(name, capability, stages=1, **overrides_for(config, M, D))
        assert kernel.metadata.shared <= budget * 1024, (name, config)


def test_the_walk_of_hopper_fits_its_shared_memory() -> None:
    from linearize_kernels.gsa.config import choose
    from linearize_kernels.gsa.walk import walk_kernel

    config = choose((9, 0), 227 * 1024, 128, 64, 64, torch.bfloat16)
    constants = overrides_for(config, 128, 64) | {"VARLEN": True, "START": True, "SHARE": 4}
    kinds = {"scale": "fp32", "p_cu": "*i32", **dict.fromkeys(("p_q", "p_k", "p_v", "p_o"), "*bf16")}
    kernel = compile_kernel(walk_kernel, 90, constants, kinds, 8)
    assert kernel.metadata.shared <= 227 * 1024


@pytest.mark.parametrize(("M", "D"), [(128, 64), (64, 128), (128, 128), (64, 256), (128, 256)])
@pytest.mark.parametrize("name", ["read", "mix", "keys", "gates"])
def test_sweeps_of_hopper_fit_its_shared_memory(name: str, M: int, D: int) -> None:
    from linearize_kernels.gsa import sweep
    from linearize_kernels.gsa.config import choose

    config = choose((9, 0), 227 * 1024, M, D, D, torch.bfloat16)
    config = config._replace(chunk_size=config.sweep_chunk_size or config.chunk_size)
    part, warps, stages = config.sweep[("read", "mix", "keys", "gates").index(name)]
    size = M if name in ("read", "gates") else D
    constants = overrides_for(config, M, D) | {
        **dict.fromkeys(("CUT", "START", "LAST", "STEPS"), False), "SEGMENTS": True, "BX": part, "SPLIT": size // part,
    }  # fmt: skip
    halves = ("q", "k", "v", "do", "x", "y", "dv", "dk", "out", "W", "w", "p", "dl")
    kinds = dict.fromkeys((f"p_{x}" for x in halves), "*bf16")
    kinds |= dict.fromkeys(("p_n", "p_strong", "p_chunks", "p_first"), "*i32")
    kernel = compile_kernel(getattr(sweep, f"{name}_kernel"), 90, constants, kinds, warps, stages)
    assert kernel.metadata.shared <= 227 * 1024


def test_triton_versions_that_were_not_checked_sweep_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    from linearize_kernels.gsa import config

    for version, sweeps in (("3.6.0", True), ("3.7.1", False)):
        monkeypatch.setattr(config.triton, "__version__", version)
        assert bool(config.choose((9, 0), 227 * 1024, 128, 128, 128, torch.bfloat16).sweep) == sweeps
        assert bool(config.choose((9, 0), 227 * 1024, 128, 64, 64, torch.bfloat16).walk) == sweeps


def test_kernels_leave_calls_to_pytorch_where_triton_is_too_old(monkeypatch: pytest.MonkeyPatch) -> None:
    """3.4 and 3.5 know no product of several bf16 parts, and compile some kernels of `mhla` and `la` to an error."""
    from linearize_kernels.gpu import launch

    assert not launch.OLD
    monkeypatch.setattr(launch, "OLD", True)
    assert "older than 3.6" in launch.unavailable(torch.device("cuda"), torch.bfloat16)


def test_a_short_call_of_few_slots_does_not_sweep() -> None:
    from linearize_kernels.gsa import config, launch

    chosen = config.choose((9, 0), 227 * 1024, 64, 128, 128, torch.bfloat16)
    whole = SimpleNamespace(cu=None, segments=None)
    for T, expected in ((2048, True), (2047, False)):
        call = SimpleNamespace(config=chosen, B=4, T=T, H=32, E=32, M=64, D=128, DV=128, call=whole)
        assert launch.sweeps(call) == expected


def test_every_size_has_a_configuration_or_says_why_not() -> None:
    from linearize_kernels.gsa.config import choose

    for shared in (48, 64, 100, 164, 227):
        for M in (16, 32, 64, 128):
            for D in (64, 80, 96, 128, 256):
                for dtype in (torch.bfloat16, torch.float16, torch.float32):
                    try:
                        config = choose((8, 6), shared * 1024, M, D, D, dtype)
                    except ValueError as error:
                        assert "shared memory" in str(error)  # noqa: PT017
                        assert shared <= 164 or dtype == torch.float32
                    else:
                        assert config.chunk_size in (16, 32, 64)


CHUNKED = ["states_kernel", "output_kernel", "logits_kernel", "query_kernel", "writes_kernel", "key_kernel"]


@pytest.mark.parametrize("name", with_slow(CHUNKED, "output_kernel", "logits_kernel", "key_kernel"))
def test_no_product_takes_the_transpose_of_a_product(name: str) -> None:
    """triton 3.4 to 3.7 miscompile some dot(trans(x)) on Hopper where x comes out of a dot; ours never does."""
    from linearize_kernels.gsa.config import choose

    config = choose((9, 0), 227 * 1024, 64, 64, 64, torch.bfloat16)
    assert transposed_products(compiled(name, 90, stages=1, **overrides_for(config, 64, 64))) == []


# ---------------------------------------------------------------- in the interpreter


def build(case: dict[str, Any]) -> dict[str, Any]:
    """Random inputs of one case."""
    torch.manual_seed(0)
    size = {"B": 1, "T": 40, "H": 2, "Hkv": 1, "E": 1, "D": 16, "DV": 16, "M": 16, **case}
    B, T, H, E, M = (size[x] for x in "BTHEM")
    dtype = getattr(torch, case.get("dtype", "float32"))
    q, k, v, do = (
        torch.randn(B, T, heads, dim).to(dtype)
        for heads, dim in ((H, size["D"]), (size["Hkv"], size["D"]), (size["Hkv"], size["DV"]), (H, size["DV"]))
    )
    g = torch.nn.functional.logsigmoid(2 * torch.randn(B, T, E, M) + 1) / 4 * case.get("gate", 1.0)
    special = case.get("special")
    g = {"closed": torch.full_like(g, -1e4), "open": torch.zeros_like(g)}.get(special, g)
    if special == "infinite":
        g[:, ::5] = -torch.inf
    if special == "turns":
        g = torch.where(torch.arange(M) == torch.arange(T)[:, None, None] % M, -3.0, 1e-2 * g)
    if special == "zero":
        q, k = 0 * q, 0 * k
    if special == "huge":
        q = 1e3 * q
    rows = len(case["cu"]) - 1 if "cu" in case else B
    state = (torch.randn(rows, E, M, size["D"]), torch.randn(rows, E, M, size["DV"])) if case.get("state") else ()
    return {
        "inputs": (q, k, v, g, *state),
        "do": do,
        "dlast": (torch.randn(rows, E, M, size["D"]), torch.randn(rows, E, M, size["DV"])),
        "masks": masks(case, B, T),
    }


def results(case: dict[str, Any], made: dict[str, Any], reference: bool) -> dict[str, torch.Tensor]:
    """Output, last memories and every gradient, by the float64 reference or by the kernels."""
    from linearize_kernels.gsa.gsa import GSAState, gsa, naive_gsa

    leaves = [(x.double() if reference else x).clone().requires_grad_(not case.get("step")) for x in made["inputs"]]
    q, k, v, g, *memories = leaves
    rows = made["dlast"][0].shape[0]
    state = GSAState(*memories, torch.zeros(rows, dtype=torch.long)) if memories else None
    layout = dict(made["masks"])
    cu = layout.pop("cu_seqlens", None) if reference else None
    if not reference:
        o, last = gsa(q, k, v, g, **layout, state=state, backend="triton")
    elif cu is None:
        o, last = naive_gsa(q, k, v, g, **layout, state=state)
    else:
        bounds, parts = case["cu"], []
        for n in range(len(bounds) - 1):
            own = None if state is None else GSAState(*(x[n : n + 1] for x in state))
            span = slice(bounds[n], bounds[n + 1])
            parts.append(naive_gsa(*(x[:, span] for x in (q, k, v, g)), state=own))
        o = torch.cat([part[0] for part in parts], 1)
        last = GSAState(*(torch.cat(x) for x in zip(*(part[1] for part in parts), strict=True)))
    out = {"o": o, "keys": last.keys, "values": last.values, "seen": last.seen}
    if not case.get("step"):
        targets = zip((o, last.keys, last.values), (made["do"], *made["dlast"]), strict=True)
        loss = sum((x.double() * y.double()).sum() for x, y in targets)
        names = ("dq", "dk", "dv", "dg", "dkeys", "dvalues")
        out |= dict(zip(names, torch.autograd.grad(loss, leaves), strict=False))
        if case.get("special") == "turns":
            out["dg at turns"] = out["dg"][leaves[3] == -3.0]
    return out


def compare(case: dict[str, Any]) -> dict[str, float]:
    """`sweep`: the kernels of sweep.py, with that many programs to fill the GPU; `chunk`: their tokens of a chunk.
    `walk`: the kernel of walk.py, with that many warps."""
    from linearize_kernels.gsa import launch
    from linearize_kernels.gsa.config import Walk

    made, configure = build(case), launch.configure
    walks = {
        "sweep": (Walk(16, 4, 1),) * 4,
        "sweep_programs": case.get("sweep"),
        "sweep_chunk_size": case.get("chunk", 0),
    }
    walks = walks if "sweep" in case else {"walk": case.get("walk", 0)}
    with mock.patch.object(launch, "configure", lambda *inputs: configure(*inputs)._replace(**walks)):
        return largest_errors(results(case, made, False), results(case, made, True))


def check_operators() -> None:
    """torch.library's own checks, fullgraph compilation, gradient checkpointing, flop counts."""
    from linearize_kernels.gsa.gsa import gsa
    from linearize_kernels.gsa.launch import chunked_op, step_op

    made = build({"T": 9, "state": True})
    q, k, v, g, K, V = (x.requires_grad_() for x in made["inputs"])
    torch.library.opcheck(chunked_op, (q, k, v, g, 0.25, None, None, K, V))
    one = [x[:, :1].detach() for x in (q, k, v, g)]
    torch.library.opcheck(step_op, (*one, 0.25, None, K.detach(), V.detach(), torch.zeros(1, dtype=torch.long)))

    def loss(*inputs: torch.Tensor) -> torch.Tensor:
        return gsa(*inputs, backend="triton")[0].square().sum()

    assert flops_whichever_way(loss, (q, k, v, g)) == 4 * 9 * 2 * (2 * 64 * (16 + 16 + 2 * 16) + 4 * 16 * (16 + 16))


def check_compiled_documents() -> None:
    """A compiled graph writes a second tensor of documents into the memory of a first, and keeps its object."""
    from linearize_kernels.gsa import launch
    from linearize_kernels.gsa.config import Walk
    from linearize_kernels.gsa.gsa import gsa

    configure, made = launch.configure, build({"T": 40, "E": 2})
    q, k, v, g = made["inputs"][:4]

    def both(*positions: torch.Tensor) -> torch.Tensor:
        one, two = (gsa(q, k, v, g, segments=(p == 0).cumsum(1), backend="triton")[0] for p in positions)
        return (one - two).sum()

    place, walks = torch.arange(40).expand(len(q), -1), {"sweep": (Walk(16, 4, 1),) * 4, "sweep_programs": 1}
    with mock.patch.object(launch, "configure", lambda *inputs: configure(*inputs)._replace(**walks)), torch.no_grad():
        expected = both(place % 7, place % 11)
        found = torch.compile(both, fullgraph=True)(place % 7, place % 11)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="inductor compiles C++")
def test_documents_of_one_compiled_pass_keep_apart() -> None:
    interpreted(check_compiled_documents)


def test_each_document_has_chunks_of_its_own() -> None:
    from linearize_kernels.gsa.launch import tables

    lengths = ([5, 11, 1, 3], [20], [1, 1, 18])
    segments = torch.stack([torch.repeat_interleave(torch.arange(len(row)), torch.tensor(row)) for row in lengths])
    chunks, first = tables(segments.int(), 8)
    begun = [[(x // 2, x % 2) for x in row if x < 40] for row in chunks[:, :-1].tolist()]
    assert begun[0] == [(0, 0), (5, 1), (13, 0), (16, 1), (17, 1)]
    assert begun[1] == [(0, 0), (8, 0), (16, 0)]
    assert begun[2] == [(0, 0), (1, 1), (2, 1), (10, 0), (18, 0)]
    assert chunks.shape == (3, 22)
    assert all(row[len(begun[i])] == 40 for i, row in enumerate(chunks.tolist()))
    assert first.tolist() == [[0, 2, 3, 5], [0, 1, 2, 3], [0, 3, 4, 5]]
