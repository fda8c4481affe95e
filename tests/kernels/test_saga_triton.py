"""The Triton kernels of SAGA against the PyTorch path in float64, in Triton's interpreter.

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
NAMES = ("q", "k", "v", "key_gate", "value_gate", "output_gate", "local", "query_map", "key_map", "norm_weight")

# group -> cases; unset sizes are B1 T40 H2 E1 D16 Dv16, phi hedgehog, norm mass
CASES: dict[str, list[dict[str, Any]]] = {
    "sizes": [
        *({"T": T, "H": 1} for T in (1, 16, 17)),
        {"B": 2, "H": 4, "E": 2, "T": 20},
        {"H": 3, "D": 20, "DV": 24, "T": 20},
        {"D": 40, "phi": "elu", "B": 2, "T": 20},
    ],
    "norms_and_maps": [
        *({"norm": norm, "H": 2, "E": E, "T": 20} for norm, E in (("none", 1), ("count", 2), ("head", 1))),
        {"phi": "elu", "T": 20},
        {"phi": "identity", "norm": "count", "T": 20},
        {"phi": "identity", "norm": "head", "D": 24, "T": 20},
    ],
    "stretches": [{"T": 200, "H": 1}, {"T": 100, "norm": "head", "phi": "elu", "H": 1, "B": 2}],
    "half_precision_and_padding": [
        {"dtype": "bfloat16"},
        {"dtype": "float16", "T": 20},
        {"dtype": "float16", "phi": "identity", "norm": "count", "local": False},
        {"padding": "right", "B": 2, "T": 20},
        {"padding": "left", "B": 2, "norm": "count", "phi": "elu"},
        {"padding": "all", "B": 2, "norm": "head", "T": 17},
        {"closed": True, "T": 5},
    ],
}


@pytest.mark.parametrize("group", with_slow(CASES, "sizes", "stretches"))
def test_kernels_match_the_reference(group: str) -> None:
    assert complaints(compare, CASES[group], TOLERANCE) == []


@pytest.mark.slow
def test_operators_compile_checkpoint_and_count() -> None:
    interpreted(check_operators)


def test_a_mixer_takes_the_kernels() -> None:
    interpreted(check_mixer)


def test_cpu_tensors_take_pytorch_unless_told_otherwise() -> None:
    from linearize_kernels.saga.saga import saga

    q = torch.rand(1, 5, 2, 16)
    inputs = [q] * 6
    assert torch.equal(saga(*inputs), saga(*inputs, backend="torch"))
    with pytest.raises(ValueError, match="on cpu"):
        saga(*inputs, backend="triton")
    with pytest.raises(ValueError, match="segments"):
        saga(*inputs, segments=torch.zeros(1, 5, dtype=torch.long), backend="triton")


# ---------------------------------------------------------------- compiled for real, without a GPU

KERNELS = ("summary_kernel", "output_kernel", "queries_kernel", "keys_kernel")


def compiled(name: str, capability: int, config: Any, D: int, phi: str, norm: str) -> Any:
    """A kernel compiled with a configuration."""
    from linearize_kernels.saga import kernels as saga_triton
    from linearize_kernels.saga.launch import GUARD, state_width, width

    tiles = getattr(config, name.removesuffix("_kernel"))
    values = {"PHI": phi, "NORM": norm, "LOCAL": True, "PADDED": False, "D": D, "DV": D, "BD": width(D)}
    values |= {"BV": width(D), "W": state_width(D, D, phi, norm), "C": tiles.chunk_size, "HALF": True}
    values |= {"BACK": False, "GUARD": GUARD, "FINE": norm == "head", "PREC": config.precision, "STAGES": tiles.stages}
    values |= {"p_real": None}
    half = ("q", "k", "v", "kg", "vg", "og", "local", "o", "do", "dq", "dk", "dv", "dkg", "dvg", "dog", "dlocal")
    kinds = {f"p_{x}": "*bf16" for x in half} | {"scale": "fp32"}
    return compile_kernel(getattr(saga_triton, name), capability, values, kinds, tiles.warps)


@pytest.mark.parametrize(("budget", "D", "phi"), [(48, 64, "elu"), (100, 32, "hedgehog"), (227, 64, "hedgehog")])
def test_safe_configurations_fit_their_budget(budget: int, D: int, phi: str) -> None:
    from linearize_kernels.saga.launch import safe

    config = safe(budget * 1024, 132, D, D, phi, torch.bfloat16)
    for name in ("queries_kernel", "keys_kernel"):
        kernel = compiled(name, 90 if budget > 164 else 80, config, D, phi, "mass")
        assert kernel.metadata.shared <= budget * 1024, (name, config)


@pytest.mark.parametrize(("name", "norm"), [*((name, "mass") for name in KERNELS), ("queries_kernel", "head")])
def test_no_product_takes_the_transpose_of_a_product(name: str, norm: str) -> None:
    from linearize_kernels.saga.launch import safe

    config = safe(227 * 1024, 132, 64, 64, "hedgehog", torch.bfloat16)
    assert transposed_products(compiled(name, 90, config, 64, "hedgehog", norm)) == []


# ---------------------------------------------------------------- in the interpreter


def build(case: dict[str, Any]) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """Tensors that take a gradient, and the other arguments of one case."""
    torch.manual_seed(0)
    size = {"B": 1, "T": 40, "H": 2, "E": 1, "D": 16, "DV": 16, "phi": "hedgehog", "norm": "mass", **case}
    B, T, H, E, D, DV = (size[name] for name in ("B", "T", "H", "E", "D", "DV"))
    F = 2 * D if size["phi"] == "hedgehog" else D
    wide = {"q": (H, D), "k": (E, D), "v": (E, DV), "key_gate": (E, F), "value_gate": (E, DV), "output_gate": (H, DV)}
    made = {name: torch.randn(B, T, *shape) for name, shape in wide.items()}
    if case.get("closed"):
        made["key_gate"].fill_(-1e4)
    if case.get("local", True):
        made["local"] = torch.randn(B, T, E, DV)
    dtype = getattr(torch, case.get("dtype", "float32"))
    made = {name: x.to(dtype) for name, x in made.items()}
    if size["phi"] == "hedgehog":
        made |= {f"{role}_map": torch.randn(heads, D, D) * D**-0.5 for role, heads in (("query", H), ("key", E))}
    if size["norm"] == "head":
        made["norm_weight"] = torch.rand(H, DV)
    return made, {"norm": size["norm"], "phi": size["phi"], "scale": D**-0.5, **masks(case, B, T)}


def call(tensors: dict[str, torch.Tensor], arguments: dict[str, Any], backend: Any) -> torch.Tensor:
    from linearize_kernels.saga.saga import Maps, saga

    given, others = dict(tensors), dict(arguments)
    maps = Maps(others.pop("phi"), others.pop("scale"), given.pop("query_map", None), given.pop("key_map", None))
    return saga(**given, **others, maps=maps, backend=backend)


def results(case: dict[str, Any], backend: Any) -> dict[str, torch.Tensor]:
    """Output and every gradient; `torch` in float64."""
    tensors, arguments = build(case)
    leaves = {n: (x.double() if backend == "torch" else x).requires_grad_() for n, x in tensors.items()}
    o = call(leaves, arguments, backend)
    torch.manual_seed(1)
    sent = torch.randn(o.shape)
    gradients = torch.autograd.grad(o, list(leaves.values()), sent.to(o.dtype))
    return {"o": o.detach(), **{f"d{n}": g for n, g in zip(leaves, gradients, strict=True)}}


def compare(case: dict[str, Any]) -> dict[str, float]:
    """Name -> largest error, relative to the largest value."""
    return largest_errors(*(results(case, backend) for backend in ("triton", "torch")))


def check_operators() -> None:
    """torch.library's own checks, fullgraph compilation, gradient checkpointing, flop counts."""
    from linearize_kernels.saga.launch import saga_op

    for case in ({"B": 2, "T": 17}, {"phi": "elu", "norm": "head", "local": False, "T": 17}):
        tensors, arguments = build(case)
        leaves = {n: x.requires_grad_() for n, x in tensors.items()}
        given = [leaves.get(name) for name in NAMES]
        rest = None, arguments["phi"], arguments["scale"] ** 0.5, arguments["norm"]
        torch.library.opcheck(saga_op, (*given, *rest))

        def loss(*values: torch.Tensor) -> torch.Tensor:
            return call(dict(zip(leaves, values, strict=True)), arguments, "triton").square().sum()  # noqa: B023

        flops = flops_whichever_way(loss, list(leaves.values()))
    assert flops == 3.5 * 2 * 17 * 3 * 16 * 16


def check_mixer() -> None:
    """Under every option that kernels know, a mixer computes with them what it does without."""
    from linearize_kernels.layout import Grid, TokenLayout
    from linearize_kernels.mixer import AttentionSite
    from linearize_kernels.saga import saga

    site = AttentionSite(0, "a", "self", 24, 4, 2, 8, 6, 8**-0.5, causal=False, grid="patches")
    for options in (
        {},
        {"feature_map": "identity"},
        {"feature_map": "relu"},
        {"feature_map": "elu", "norm": "head"},
        {"norm": "none"},
    ):
        torch.manual_seed(0)
        mixer: Any = saga.SelectiveGates(site, **options)
        mixer.reset_parameters()
        torch.nn.init.normal_(mixer.taps)
        q, k, v, x = (torch.randn(2, 13, *shape) for shape in ((4, 8), (2, 8), (2, 6), (24,)))
        layout = TokenLayout(causal=False, grid=Grid((3, 4), prefix=1))
        found = []
        for runs_on in (saga.runs_on, lambda *_: "not now"):
            with patch.object(saga, "runs_on", runs_on):
                mixer.zero_grad()
                o = mixer(q, k, v, x, layout)[0]
                o.square().sum().backward()
            found.append({"o": o.detach(), **{n: p.grad.clone() for n, p in mixer.named_parameters()}})
        worst = max(largest_errors(*found).values())
        assert worst < 1e-4, (options, largest_errors(*found))
