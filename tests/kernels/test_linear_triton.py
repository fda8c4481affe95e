"""The Triton kernels of linear attention against the definitions of la and retnet, in Triton's interpreter.

Few cases have bf16 (see triton_tools.py); the rest of it is proved on a GPU (test_linear_gpu.py).
"""

from __future__ import annotations

import importlib
from functools import partial
from typing import Any
from unittest.mock import patch

import pytest
import torch
from conftest import with_slow
from torch import Tensor
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
TOLERANCE = {"float32": 2e-5, "float16": 4e-3, "bfloat16": 2e-2}

# group -> cases; unset sizes are B1 T40 H2 Hkv1 D16 Dv16. `of` la, unless another; stretches are 48 tokens here, and
# from 96 tokens on the scan walks in three parts or four
CASES: dict[str, list[dict[str, Any]]] = {
    "lengths": [{"T": T} for T in (1, 2, 15, 16, 17, 150)],
    "heads_and_sizes": [
        {"B": 2, "H": 4, "Hkv": 2},
        {"H": 3, "Hkv": 1, "D": 20, "DV": 24},
        {"H": 2, "Hkv": 2, "DV": 32},
    ],
    "half_precision": [
        {"dtype": "bfloat16"},
        {"dtype": "float16"},
        {"of": "retnet", "dtype": "float16"},
        {"of": "both", "dtype": "float16"},
    ],
    "unit_vectors": [{"unit": True, "D": 20, "DV": 24, "state": True}, {"unit": True, "T": 99, "special": "zero"}],
    "states": [
        {"state": True},
        {"state": True, "B": 2, "T": 66, "Hkv": 2},
        {"state": True, "T": 1},
        {"T": 99, "frozen": True},
    ],
    "segments": [{"segments": 9, "B": 2}, {"segments": 33, "T": 99, "state": True}],
    "sequences": [{"cu": [0, 1, 1, 36, 120], "T": 120, "state": True}],
    "padding": [{"padding": "each", "B": 3, "state": True}],
    "parts": [
        {"T": 100, "B": 2, "padding": "left", "state": True},
        {"of": "retnet", "E": 2, "T": 100, "B": 2, "padding": "left", "gates": True, "state": True},
        {"of": "retnet", "E": 2, "T": 150, "segments": 61, "gates": True, "state": True},
        {"of": "retnet", "learned": True, "E": 2, "T": 150, "B": 2, "state": True},
    ],
    "mass": [{"mass": True, "T": 99}, {"of": "both", "mass": True, "unit": True}],
    "opposite": [{"special": "opposite", "T": 1, "H": 1}],
    "bidirectional": [{"of": "both", "T": 150, "H": 4, "Hkv": 2}, {"of": "both", "D": 20, "DV": 24, "unit": True}],
    "bidirectional_padded": [{"of": "both", "padding": "left", "B": 2, "unit": True}],
    "retnet": [{"of": "retnet", "T": T, "B": 2, "state": True} for T in (1, 2, 99)],
    "retnet_heads": [
        {"of": "retnet", "learned": True, "H": 4, "Hkv": 1, "E": 2, "gates": True, "T": 66, "D": 20, "DV": 24}
    ],
    "retnet_masks": [
        {"of": "retnet", "learned": True, "segments": 9, "B": 2, "gates": True, "state": True},
        {"of": "retnet", "learned": True, "padding": "left", "B": 2, "gates": True, "state": True},
        {"of": "retnet", "learned": True, "cu": [0, 1, 1, 36, 120], "T": 120, "state": True, "gates": True},
    ],
    # Enough heads that the scan makes the output (5 programs are enough here).
    "retnet_walks": [
        {"of": "retnet", "segments": 9, "T": 33, "B": 2, "H": 4, "E": 2, "gates": True, "state": True},
        {"of": "retnet", "padding": "left", "T": 33, "B": 2, "H": 4, "gates": True, "state": True},
        {"of": "retnet", "dtype": "float16", "T": 33, "B": 2, "H": 4},
        {"of": "retnet", "T": 33, "B": 2, "H": 4, "gates": True, "frozen": True},
    ],
    "steps": [
        {"step": True, "T": 1},
        {"step": True, "T": 1, "unit": True, "B": 2, "H": 4, "padding": "left", "D": 20, "DV": 24},
        {"step": True, "T": 1, "of": "retnet", "gates": True, "B": 2, "H": 4, "E": 2, "padding": "left"},
    ],
}


SLOW = ("heads_and_sizes", "lengths", "parts", "segments", "states", "unit_vectors")
SLOW += ("retnet_heads", "retnet_masks", "retnet_walks")


@pytest.mark.parametrize("group", with_slow(CASES, *SLOW))
def test_kernels_match_the_definition(group: str) -> None:
    assert complaints(compare, CASES[group], TOLERANCE) == []


# Of the norm of the gradients of a and b; 0.04 to 3.6 where the rounding of o does not drop out.
SLOPES = 2e-3
EVEN: list[dict[str, Any]] = [
    {"B": 2, "H": 4, "Hkv": 2},
    {"H": 4, "b": 0.1},
    {"B": 3, "padding": "each"},
    {"segments": 33},
    {"cu": [0, 1, 1, 70, 150]},
    {"unit": True},
    {"of": "both", "B": 2, "H": 4, "Hkv": 2},
    {"of": "both", "padding": "left", "B": 2, "unit": True},
]


@pytest.mark.slow
@pytest.mark.parametrize("case", EVEN, ids=str)
def test_slopes_learn_where_weights_are_nearly_even(case: dict[str, Any]) -> None:
    assert interpreted(slope_error, {"special": "even", "dtype": "float16", "T": 150, **case}) < SLOPES


# Of the gradients of decays of 2 to 70 tokens, each over its own size; 0.17 where places of one row cancel.
DECAYS = 2e-3


@pytest.mark.slow
def test_decays_learn_in_half_precision_on_long_rows() -> None:
    assert interpreted(decay_error, {"of": "retnet", "learned": True, "dtype": "float16", "T": 500, "E": 4}) < DECAYS


def decay_error(case: dict[str, Any]) -> float:
    """Of decays' gradients in half precision, each over its value in float64: the norm."""
    made = build({"H": 4, "Hkv": 2, **case})
    ours, exact = (results(case, made, *how)["dlog_decay"] for how in (("triton", False), ("torch", True)))
    return float(((ours.double() - exact) / exact).norm())


def slope_error(case: dict[str, Any]) -> float:
    """Of the gradients of a and b in half precision, over their norm in float64."""
    made = build(case)
    ours, exact = (results(case, made, *how) for how in (("triton", False), ("torch", True)))
    ours, exact = (torch.cat([found["da"], found["db"]]).double() for found in (ours, exact))
    return float((ours - exact).norm() / exact.norm())


@pytest.mark.slow
def test_operators_compile_checkpoint_and_count() -> None:
    interpreted(check_operators)


def test_cpu_tensors_take_pytorch_unless_told_otherwise() -> None:
    from linearize_kernels.la.la import la

    q = torch.randn(1, 5, 2, 16)
    assert torch.equal(la(q, q, q)[0], la(q, q, q, backend="torch")[0])
    with pytest.raises(ValueError, match="on cpu"):
        la(q, q, q, backend="triton")


def test_fp32_is_exact_in_the_kernels_unless_torch_may_round_to_tf32() -> None:
    assert interpreted(precisions) == ["bf16x6", "tf32", "bf16x6", "tf32", True]
    assert interpreted(passed_on) == ["bf16x6", "tf32"] * 3


@pytest.mark.parametrize(
    ("capability", "wide", "reason"),
    [
        ((9, 0), 128, ""),
        ((9, 0), 256, "exact fp32 of head dim 256 needs more registers than there are"),
        ((7, 5), 64, "a GPU of compute capability below 8.0 has no tensor cores for bf16, which exact fp32 needs"),
    ],
)
def test_exact_fp32_is_left_to_pytorch_where_six_products_do_not_fit(
    capability: tuple[int, int], wide: int, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from linearize_kernels.gpu.target import Target
    from linearize_kernels.linear import launch

    monkeypatch.setattr(launch, "target", lambda device: Target(capability, 232448, 132))
    assert launch.six_products(torch.device("cuda"), wide) == reason


@pytest.mark.parametrize("name", ["la", "retnet"])
def test_an_unknown_precision_is_refused(name: str) -> None:
    op = getattr(importlib.import_module(f"linearize_kernels.{name}.{name}"), name)
    q, more = torch.rand(1, 5, 2, 16), {"log_decay": torch.full((2,), -0.1)} if name == "retnet" else {}
    with pytest.raises(ValueError, match=r"precision='ieee'.*tf32.*bf16x6"):
        op(q, q, q, precision="ieee", **more)


# ---------------------------------------------------------------- compiled for real, without a GPU


def constants(config: Any, tiles: Any, D: int, **changes: bool) -> dict[str, Any]:
    normalised = changes.get("NORM", True)
    on = ("NORM", "UNIT", "STATE", "LATER", "AUX", "REVERSE", "START", "LAST")
    off = ("VARLEN", "SEGMENTS", "PADDED", "CUT", "OUT")
    none = dict.fromkeys(("p_seg", "p_real", "p_place", "p_stretches", "p_rows"))
    return {
        **none,
        **dict.fromkeys(on, True),
        **dict.fromkeys(off, False),
        **dict.fromkeys(("DECAY", "FAR", "READ", "WRITE"), not normalised),
        **changes,
        "SHARE": 1,
        "D": D,
        "DV": D,
        "BD": D,
        "BDV": D,
        "BX": min(config.scan_rows, D),
        "BZ": min(tiles.block, D),
        "C": tiles.chunk_size,
        "K": min(tiles.chunk_size, config.keys),
        "R": 16,
        "G": 1,
        "GUARD": 1e-6,
        "SPLIT": config.split_sums,
        "PREC": config.precision,
        "STAGES": tiles.stages,
    }


HALF = ("p_q", "p_k", "p_v", "p_o", "p_do", "p_dq", "p_dk", "p_dv", "p_l", "p_r", "p_S", "p_dS")
KINDS = dict.fromkeys(HALF, "*bf16") | {"scale": "fp32"}
# kernel -> whose tiles it has
TILES = {"out_kernel": "out", "gradients_kernel": "gradients", "scan_kernel": "scan"}


def compiled(name: str, capability: int, config: Any, D: int, **flags: bool) -> Any:
    from linearize_kernels.linear import causal as linear_triton
    from linearize_kernels.linear import states as linear_states

    kernel, tiles = getattr(linear_triton, name, None) or getattr(linear_states, name), getattr(config, TILES[name])
    return compile_kernel(kernel, capability, constants(config, tiles, D, **flags), KINDS, tiles.warps)


@pytest.mark.parametrize("normalised", [True, False], ids=["la", "retnet"])
@pytest.mark.parametrize("name", TILES)
def test_no_product_takes_the_transpose_of_a_product(name: str, normalised: bool) -> None:
    from linearize_kernels.linear.launch import choose

    config = choose((9, 0), 227 * 1024, 132, 64, 64, torch.bfloat16, normalised)
    assert transposed_products(compiled(name, 90, config, 64, NORM=normalised, UNIT=False)) == []


def test_chunks_fill_the_stretches_of_every_configuration() -> None:
    from linearize_kernels.linear.launch import SHIPPED, choose

    for capability, D, dtype, normalised in [*SHIPPED, ((8, 0), 256, torch.float32, True)]:
        config = choose(capability, 227 * 1024, 132, D, D, dtype, normalised)
        for tiles in (config.out, config.gradients):
            assert config.stretch % tiles.chunk_size == 0
            assert tiles.chunk_size % min(tiles.chunk_size, config.keys) == 0
        assert config.stretch % config.scan.chunk_size == 0


@pytest.mark.parametrize("name", TILES)
@pytest.mark.parametrize(("budget", "D"), [(48, 64), (100, 128), (227, 128)])
def test_safe_configurations_fit_their_budget(budget: int, D: int, name: str) -> None:
    from linearize_kernels.linear.launch import choose

    config = choose((8, 7), budget * 1024, 100, D, D, torch.bfloat16, True)
    made = compiled(name, 90 if budget > 164 else 80, config, D, UNIT=False)
    assert made.metadata.shared <= budget * 1024, config


# ---------------------------------------------------------------- in the interpreter


def build(case: dict[str, Any], device: str = "cpu") -> dict[str, Any]:
    """Random inputs of one case: leaves by name, what arrives at outputs, masks, decays."""
    torch.manual_seed(0)
    size = {"B": 1, "T": 40, "H": 2, "Hkv": 1, "D": 16, "DV": 16, **case}
    B, T, H, Hkv, D, DV = (size[x] for x in ("B", "T", "H", "Hkv", "D", "DV"))
    E, dtype = size.get("E", Hkv), getattr(torch, case.get("dtype", "float32"))
    rows = len(case["cu"]) - 1 if "cu" in case else B
    q, k, v, do = (torch.randn(B, T, *s) for s in ((H, D), (Hkv, D), (Hkv, DV), (H, DV)))
    if size.get("of") != "retnet" and not case.get("unit"):
        q, k = (torch.nn.functional.normalize(y, dim=-1) for y in (q, k))
    if case.get("special") == "zero":
        q, k = 0 * q, 0 * k
    if case.get("special") == "opposite":
        q = -k
    if case.get("special") == "even":  # as Hedgehog's features are at first: all products are about 1
        q, k = (D**-0.5 * (1.0 + 0.05 * y) for y in (q, k))
    leaves = {name: y.to(dtype) for name, y in zip("qkv", (q, k, v), strict=True)}
    decays = -torch.logspace(-0.5, -2, E)
    arrive = {"o": do, "S": torch.randn(rows, E, D, DV)}
    if size.get("of") == "retnet":
        if case.get("gates"):
            leaves |= {"read_gate": torch.rand(B, T, H), "write_gate": torch.rand(B, T, E)}
        if case.get("learned"):
            leaves["log_decay"] = decays
    else:
        leaves |= {"a": torch.rand(H) + 0.5, "b": torch.rand(H) * 0.4 + 0.5}
        if case.get("special") == "even":
            b = case.get("b", 0.9)
            leaves |= {"a": torch.full((H,), 1.0 - b), "b": torch.full((H,), b)}
        arrive |= {"z": torch.randn(rows, E, D), "u": torch.randn(rows, E, DV), "g": torch.randn(B, T, H)}
    if case.get("state"):
        states = {"S": (D, DV), "z": (D,), "u": (DV,)} if "a" in leaves else {"S": (D, DV)}
        leaves |= {name: torch.randn(rows, E, *shape) for name, shape in states.items()}
    fixed = {"masks": masks(case, B, T), "decays": {"log_decay": decays}}
    made = {"leaves": leaves, "arrive": arrive, **fixed}
    return {kind: {name: y.to(device) for name, y in tensors.items()} for kind, tensors in made.items()}


def run_la(case: dict[str, Any], leaves: dict[str, Tensor], made: dict[str, Any], backend: Any) -> dict[str, Tensor]:
    from linearize_kernels.la.la import LAState, la, la_with_mass

    both = case.get("of") == "both"
    q, k, v, a, b = (leaves[name] for name in ("q", "k", "v", "a", "b"))
    rows = len(case["cu"]) - 1 if "cu" in case else q.shape[0]
    count = torch.full((rows,), 5, device=q.device)
    state = LAState(leaves["S"], leaves["z"], leaves["u"], count) if "S" in leaves else None
    way: Any = {"causal": not both, "unit": case.get("unit", False), "backend": backend}
    out = {}
    if case.get("mass"):
        options: Any = {"precision": "auto", "chunk_size": 64}
        masked = (made["masks"].get(name) for name in ("padding", "segments", "cu_seqlens"))
        out["o"], out["g"], last = la_with_mass(q, k, v, a, b, *masked, state, **way, **options)
    else:
        out["o"], last = la(q, k, v, a=a, b=b, **made["masks"], state=state, **way)
    return out if both else out | {"S": last.products, "z": last.keys, "u": last.values, "tokens": last.tokens}


def run_retnet(
    case: dict[str, Any], leaves: dict[str, Tensor], made: dict[str, Any], backend: Any
) -> dict[str, Tensor]:
    from linearize_kernels.retnet.retnet import RetNetState, retnet

    own = dict(leaves)
    memory = own.pop("S", None)
    state = None if memory is None else RetNetState(memory)
    way: Any = {"backend": backend}
    o, last = retnet(**(made["decays"] | own), **made["masks"], state=state, **way)
    return {"o": o, "S": last.memory}


def results(case: dict[str, Any], made: dict[str, Any], backend: str, exact: bool) -> dict[str, Tensor]:
    """Outputs, last states and every gradient; `exact`: in float64."""
    run = run_retnet if case.get("of") == "retnet" else run_la
    learns = not case.get("step") and not case.get("frozen")
    leaves = {n: (y.double() if exact else y).clone().requires_grad_(learns) for n, y in made["leaves"].items()}
    out = run(case, leaves, made, backend)
    if learns:
        loss = sum((y.double() * made["arrive"][name].double()).sum() for name, y in out.items() if name != "tokens")
        gradients = torch.autograd.grad(loss, leaves.values(), allow_unused=True)  # type: ignore[arg-type]
        out |= {f"d{name}": y for name, y in zip(leaves, gradients, strict=True) if y is not None}
    return out


def compare(case: dict[str, Any]) -> dict[str, float]:
    made = build(case)
    # The PyTorch path, which its own tests hold to the definition.
    ours, exact = results(case, made, "triton", False), results(case, made, "torch", True)
    assert ours.keys() == exact.keys()
    return largest_errors(ours, exact)


def check_operators() -> None:
    """torch.library's own checks, fullgraph compilation, gradient checkpointing, flop counts."""
    from linearize_kernels.la.la import la
    from linearize_kernels.linear.bidirectional_launch import both_op
    from linearize_kernels.linear.launch import chunked_op, step_op

    made = build({"T": 9, "state": True})["leaves"]
    q, k, v, a, b, S, z, u = (y.requires_grad_() for y in made.values())
    first = torch.cat([S.flatten(2), z, u, torch.ones(1, 1, 4)], -1).detach().requires_grad_()
    rest = (None, None, None, 1.0, False, "bf16x6", None, None, None, first, True)
    torch.library.opcheck(chunked_op, (q, k, v, a, b, *rest))
    torch.library.opcheck(both_op, (q, k, v, a, b, True, "bf16x6", None))
    one = [y[:, :1].detach() for y in (q, k, v)]
    state = (S.detach(), z.detach(), u.detach(), torch.zeros(1, dtype=torch.long))
    torch.library.opcheck(step_op, (*one, a.detach(), b.detach(), None, None, None, 1.0, False, None, *state))

    for causal, forward in ((True, 2 * 64 * 32 + 4 * 16 * 16), (False, 4 * 16 * 16)):

        def loss(*leaves: Tensor, causal: bool = causal) -> Tensor:
            q, k, v, a, b = leaves
            return la(q, k, v, a=a, b=b, causal=causal, backend="triton")[0].square().sum()

        backward = 2 * 64 * 5 * 16 + 10 * 16 * 16 if causal else 2 * forward
        assert flops_whichever_way(loss, (q, k, v, a, b)) == 9 * 2 * (forward + backward)


def precisions() -> list[Any]:
    """What `auto` stands for as torch is, where its products may be tf32, and again without; what was asked for; and
    whether fp32 takes the kernels."""
    from linearize_kernels.linear.launch import resolve_precision, use_triton

    q, found, kept = torch.rand(1, 5, 2, 64), [], torch.get_float32_matmul_precision()
    try:
        for precision in ("highest", "high", "highest"):
            torch.set_float32_matmul_precision(precision)
            found.append(resolve_precision("auto"))
    finally:
        torch.set_float32_matmul_precision(kept)
    return [*found, resolve_precision("tf32"), use_triton("auto", "auto", q, q, 2)]


def passed_on() -> list[str]:
    """The precision that kernels get, by default and as asked for: la's, la's both ways, retnet's."""
    from linearize_kernels.la import la as of_la
    from linearize_kernels.retnet import retnet as of_retnet

    found: list[str] = []
    q, log_decay = torch.rand(1, 20, 2, 16), torch.full((2,), -0.1)
    ways: list[tuple[Any, str, int, Any]] = [
        (of_la, "chunked_op", 10, of_la.la),
        (of_la, "both_op", 6, partial(of_la.la, causal=False)),
        (of_retnet, "chunked_op", 10, partial(of_retnet.retnet, log_decay=log_decay)),
    ]
    for module, name, index, op in ways:
        real = getattr(module, name)

        def spy(*values: Any, index: int = index, real: Any = real) -> Any:
            found.append(values[index])
            return real(*values)

        with patch.object(module, name, spy):
            op(q, q, q, backend="triton")
            op(q, q, q, backend="triton", precision="tf32")
    return found
