"""The Triton kernels of MHLA against the PyTorch path in float64, in Triton's interpreter.

Few cases have bf16 (see triton_tools.py); the rest of it is proved on a GPU (docs/measurements/kernel-notes.md).
"""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

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

# group -> cases; unset sizes are B1 T40 H2 E1 F16 Dv16 M4 C16
CASES: dict[str, list[dict[str, Any]]] = {
    "lengths": [{"T": T} for T in (2, 16, 17)],
    "heads_and_sizes": [{"B": 2, "H": 4, "E": 2}, {"H": 3, "F": 40, "DV": 24}, {"M": 2}, {"M": 18}, {"C": 32}],
    "far": [{"T": 600, "E": 2}],
    "half_precision": [
        {"dtype": "bfloat16"},
        {"dtype": "float16"},
        {"dtype": "float16", "size": [5, 8], "blocks": [1, 2, 2]},
    ],
    "segments": [{"segments": 9, "B": 2}, {"segments": 35, "T": 100, "H": 1, "padding": "left", "B": 2}],
    "many_groups_of_documents": [{"segments": 290, "T": 620, "H": 1}],
    "sequences": [{"cu": [0, 20, 20, 21, 70], "T": 70}],
    "padding": [{"padding": "right", "B": 2}, {"padding": "all", "B": 2}],
    "steps": [
        {"step": True, "T": 36, "M": 3, "H": 4, "E": 2, "F": 20, "DV": 24},
        {"step": True, "T": 34, "M": 2, "B": 2, "padding": "left"},
        {"step": True, "T": 34, "normalise": False, "waits": True},
    ],
    "nothing": [{"zero": True}, {"zero": True, "size": [5, 8], "blocks": [1, 2, 2]}],
    "grids": [
        {"size": [5, 8], "blocks": [1, 2, 2]},
        {"size": [5, 7], "blocks": [1, 2, 3], "outside": [1, 2], "T": 38, "H": 4, "E": 2, "F": 20, "DV": 24},
        {"size": [2, 4, 5], "blocks": [2, 2, 2], "normalise": False},
        {"size": [5, 8], "blocks": [1, 2, 2], "padding": "right", "segments": 20, "B": 2, "E": 2, "F": 40, "DV": 40},
        {"size": [6, 12], "blocks": [1, 6, 6], "T": 72},
        {"size": [9, 8], "blocks": [1, 9, 8], "T": 72},
        {"size": [8, 10], "blocks": [1, 1, 2], "T": 80, "B": 2, "F": 20},
    ],
}


SLOW = ("far", "grids", "heads_and_sizes", "lengths", "many_groups_of_documents", "segments", "sequences")


@pytest.mark.parametrize("group", with_slow(CASES, *SLOW))
def test_kernels_match_the_reference(group: str) -> None:
    assert complaints(compare, CASES[group], TOLERANCE) == []


@pytest.mark.slow
def test_operators_compile_checkpoint_and_count() -> None:
    interpreted(check_operators)


def test_summaries_of_bf16_are_bf16_where_no_gradients_are_wanted() -> None:
    """Their errors are in tests/gpu."""
    from linearize_kernels.mhla.bidirectional_launch import GridCall
    from linearize_kernels.mhla.bidirectional_launch import results as room

    (q, k, v, w), arguments = build({"size": [5, 8], "blocks": [1, 2, 2], "dtype": "bfloat16"})
    place: Any = arguments["places"].table, arguments["places"].size, True, True
    kinds = [room(GridCall(q, k, v, w, *place, keep))[2].dtype for keep in (False, True)]
    kinds += [room(GridCall(q.half(), k.half(), v.half(), w, *place, False))[2].dtype]
    assert kinds == [torch.bfloat16, torch.float32, torch.float32]
    assert interpreted(kept) == [False, True, False]


def kept() -> list[bool]:
    """Whether kernels keep summaries: nothing wants a gradient, the weights alone do, and again in no_grad."""
    from linearize_kernels.mhla import mhla as paths

    (q, k, v, w), arguments = build({"size": [5, 8], "blocks": [1, 2, 2]})
    found: list[bool] = []

    def spy(*values: Any) -> Any:
        found.append(values[-1])
        return grid_op(*values)

    grid_op = paths.grid_op
    with patch.object(paths, "grid_op", spy):
        for weights, wanted in ((w, True), (w.clone().requires_grad_(), True), (w.clone().requires_grad_(), False)):
            with torch.set_grad_enabled(wanted):
                paths.mix_bidirectional(q, k, v, weights, arguments["places"], True, "triton")
    return found


def test_cpu_tensors_take_pytorch_unless_told_otherwise() -> None:
    from linearize_kernels.mhla.mhla import mhla, mhla_grid
    from linearize_kernels.mhla.places import place_line

    q, k, w = torch.rand(1, 5, 2, 16), torch.rand(1, 5, 1, 16), torch.rand(1, 4, 4)
    assert torch.equal(mhla(q, k, k, w)[0], mhla(q, k, k, w, backend="torch")[0])
    with pytest.raises(ValueError, match="on cpu"):
        mhla(q, k, k, w, backend="triton")
    with pytest.raises(ValueError, match="on cpu"):
        mhla_grid(q, k, k, w, place_line(q, 4, 4, (0, 0), None, None), backend="triton")


def test_more_than_the_kernels_count_is_refused() -> None:
    from linearize_kernels.mhla.mhla import mhla, mhla_grid
    from linearize_kernels.mhla.places import place_line

    q, k, w = torch.rand(1, 4, 2, 16), torch.rand(1, 4, 1, 16), torch.rand(1, 2, 2)
    rows = [y.expand(32768, -1, -1, -1) for y in (q, k, k)]
    places = place_line(q, 2, 2, (0, 0), None, None)
    long = [y[:, :1].expand(-1, 1 << 26, -1, -1) for y in (q, k, k)]
    with pytest.raises(ValueError, match=r"67108864.*32.*32"):
        mhla_grid(*long, w, places, backend="triton")
    with pytest.raises(ValueError, match=r"65536.*GPU's"):
        mhla(*rows, w, backend="triton")
    sequences = torch.arange(32769, dtype=torch.int32)
    with pytest.raises(ValueError, match=r"65536.*GPU's"):
        mhla(q, k, k, w, cu_seqlens=sequences.clamp(max=4), backend="triton")


# ---------------------------------------------------------------- compiled for real, without a GPU

KERNELS = ("summary_kernel", "output_kernel", "query_kernel", "key_kernel", "value_kernel", "pairs_kernel",
           "back_kernel", "give_kernel", "sum_kernel", "turn_kernel")  # fmt: skip


def compiled(name: str, capability: int, config: Any, F: int, M: int) -> Any:
    """A kernel compiled with a configuration, causal where there are two."""
    from linearize_kernels.mhla import backward as mhla_triton_bwd
    from linearize_kernels.mhla import bidirectional as mhla_both
    from linearize_kernels.mhla import forward as mhla_triton
    from linearize_kernels.mhla.launch import constants

    kernel = next(vars(file)[name] for file in (mhla_both, mhla_triton, mhla_triton_bwd) if name in vars(file))
    both = hasattr(mhla_both, name)
    values = constants(config, M, F, F, normalise=True, table=False)
    values |= {"KIND": 2, "REVERSE": True, "KEEP": False, "PREV": True, "CAUSAL": True, "BACK": True, "MASS": False}
    values |= {"G": 2, "BN": 32}
    values |= dict.fromkeys(("p_number", "p_document", "p_far", "p_dg"))
    values |= {} if both else {"p_table": None}
    half = ("p_q", "p_k", "p_v", "p_o", "p_do", "p_dq", "p_dk", "p_dv", "p_x", "p_y")
    kinds = dict.fromkeys(half, "*bf16") | {"p_table": "*i32"}
    return compile_kernel(kernel, capability, values, kinds, config.warps)


@pytest.mark.parametrize(("budget", "F"), [(48, 64), (100, 128), (227, 128)])
def test_safe_configurations_fit_their_budget(budget: int, F: int) -> None:
    from linearize_kernels.mhla.launch import group, safe

    config = safe(budget * 1024, F, group(32), torch.bfloat16)
    for name in ("mix_kernel", "query_kernel", "key_kernel", "back_kernel", "give_kernel"):
        kernel = compiled(name, 90 if budget > 164 else 80, config, F, 32)
        assert kernel.metadata.shared <= budget * 1024, (name, config)


@pytest.mark.parametrize("name", KERNELS)
def test_no_product_takes_the_transpose_of_a_product(name: str) -> None:
    from linearize_kernels.mhla.launch import group, safe

    config = safe(227 * 1024, 64, group(16), torch.bfloat16)
    assert transposed_products(compiled(name, 90, config, 64, 16)) == []


# ---------------------------------------------------------------- in the interpreter


def build(case: dict[str, Any]) -> tuple[list[torch.Tensor], dict[str, Any]]:
    """q, k, v, weights and the other arguments of one case."""
    from linearize_kernels.layout import Grid
    from linearize_kernels.mhla.places import number_of_blocks, place_grid

    torch.manual_seed(0)
    size = {"B": 1, "T": 40, "H": 2, "E": 1, "F": 16, "DV": 16, "M": 4, "C": 16, **case}
    B, T, M = size["B"], size["T"], size["M"]
    q, k, v = (torch.rand(B, T, size[heads], size[dim]) for heads, dim in (("H", "F"), ("E", "F"), ("E", "DV")))
    q, k = (0 * q, 0 * k) if case.get("zero") else (q, k)
    arguments: dict[str, Any] = {"normalise": case.get("normalise", True)}
    arguments |= masks(case, B, T)
    if "size" in case:
        grid = Grid(tuple(case["size"]), *case.get("outside", ()))
        layout = arguments.get("padding"), arguments.get("segments")
        arguments["places"] = place_grid(grid, tuple(case["blocks"]), q, *layout)
        M = number_of_blocks(grid, tuple(case["blocks"]))
    else:
        arguments["block_size"] = size["C"]
    dtype = getattr(torch, case.get("dtype", "float32"))
    return [q.to(dtype), k.to(dtype), (v - 0.5).to(dtype), torch.rand(size["E"], M, M) + 0.05], arguments


def results(case: dict[str, Any], backend: Any) -> dict[str, torch.Tensor]:
    """Output, normaliser, last state and every gradient; `torch` in float64."""
    from linearize_kernels.mhla.mhla import mix_bidirectional, mix_causal

    inputs, arguments = build(case)
    q, k, v, w = leaves = [(x.double() if backend == "torch" else x).requires_grad_() for x in inputs]
    normalise, padding, segments = (arguments.get(x) for x in ("normalise", "padding", "segments"))
    out = {}
    if "size" in case:
        o, g = mix_bidirectional(q, k, v, w, arguments["places"], bool(normalise), backend)
    else:
        cu, C = arguments.get("cu_seqlens"), arguments["block_size"]
        o, g, state = mix_causal(q, k, v, w, C, bool(normalise), padding, segments, cu, None, backend)
        out = dict(state._asdict().items())
    # Gradients arrive at the mass too, through the window.
    mass = g.log()
    torch.manual_seed(1)
    loss = (o.double() * torch.randn(o.shape).double()).sum() + (mass.double() * torch.randn(g.shape).double()).sum()
    return {
        "o": o,
        "mass": mass,
        **dict(zip(("dq", "dk", "dv", "dw"), torch.autograd.grad(loss, leaves), strict=True)),
        **out,
    }


def steps(case: dict[str, Any], backend: Any) -> dict[str, torch.Tensor]:
    """Outputs of token after token, and the last state."""
    from linearize_kernels.mhla import mhla as mhla_paths

    (q, k, v, w), arguments = build(case)
    padding, outputs, state = arguments.get("padding"), [], None
    C, normalise = arguments["block_size"], arguments["normalise"]
    # With 0 it waits to hear whether a block is complete, as for states that are large.
    copied = 0 if case.get("waits") else mhla_paths.COPIED
    for t in range(q.shape[1]):
        token = (y[:, t : t + 1] for y in (q, k, v))
        own = None if padding is None else padding[:, t : t + 1]
        with patch.object(mhla_paths, "COPIED", copied):
            o, g, state = mhla_paths.mix_causal(*token, w, C, normalise, own, None, None, state, backend)
        outputs.append(torch.cat([o.flatten(1), g.flatten(1)], 1))
    assert state is not None
    return {"o": torch.stack(outputs), **state._asdict()}


def compare(case: dict[str, Any]) -> dict[str, float]:
    """Name -> largest error, relative to the largest value."""
    run = steps if "step" in case else results
    ours, exact = ({n: x.detach() for n, x in run(case, backend).items()} for backend in ("triton", "torch"))
    return largest_errors(ours, {name: x for name, x in exact.items() if x.numel()})


def check_operators() -> None:
    """torch.library's own checks, fullgraph compilation, gradient checkpointing, flop counts."""
    from torch._subclasses import FakeTensorMode
    from torch.utils.flop_counter import FlopCounterMode

    from linearize_kernels.mhla.bidirectional_launch import NAMESPACE, grid_op
    from linearize_kernels.mhla.launch import mhla_op
    from linearize_kernels.mhla.mhla import mhla

    grid_backward_op = getattr(torch.ops, NAMESPACE).mhla_grid_backward.default
    inputs, arguments = build({"size": [5, 8], "blocks": [1, 2, 2]})
    places = arguments["places"]
    leaves = [x.requires_grad_() for x in inputs]
    call = (*leaves, places.table, places.size, places.covered, True, True)
    torch.library.opcheck(grid_op, call)
    o, *saved = (x.detach() for x in grid_op(*call))  # opcheck does not compare strides of gradients, inductor does
    backward = (torch.ones_like(o), None, *(x.detach() for x in leaves), *call[4:], *saved)
    with FakeTensorMode() as fake:
        found = grid_backward_op(*(fake.from_tensor(x) if isinstance(x, torch.Tensor) else x for x in backward))
    assert [x.stride() for x in found] == [x.stride() for x in grid_backward_op(*backward)]
    with FlopCounterMode(display=False) as counter:
        grid_op(*leaves, places.table, places.size, True, True, True)[0].square().sum().backward()
    assert counter.get_total_flops() == 3.5 * (40 * 2 * 512 + 2 * 40 * 256 + 2 * 4 * 4 * 256), counter.get_total_flops()
    inputs, _ = build({"T": 17})
    q, k, v, w = (x.requires_grad_() for x in inputs)
    torch.library.opcheck(mhla_op, (q, k, v, w, None, None, None, 16, True))
    torch.library.opcheck(mhla_op, (q, k, v, w, None, None, None, 16, False))

    def loss(*inputs: torch.Tensor) -> torch.Tensor:
        return mhla(*inputs, block_size=16, backend="triton")[0].square().sum()

    flops = 4.5 * (17 * 2 * (2 * 16 * 32 + 2 * 256) + 2 * 17 * 256 + 2 * 2 * 4 * 256)
    assert flops_whichever_way(loss, (q, k, v, w)) == flops
