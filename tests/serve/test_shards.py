"""Which mixers divide among processes by heads, and what each process then has."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from linearize.plan.mechanisms import load_mechanism, mechanism_names, resolve_options
from linearize.serve import shards
from linearize.serve.shards import divides, shard, shard_spec
from linearize_kernels.mixer import AttentionSite, option_types

SITE = AttentionSite(0, "layers.0", "Attention", 32, 8, 4, 8, 8, 8**-0.5, True)
RECORD = dataclasses.asdict(SITE)
CAUSAL = [name for name in mechanism_names() if load_mechanism(name).causal]


@pytest.mark.parametrize("window", [0, 4])
@pytest.mark.parametrize("name", CAUSAL)
def test_heads_divide_where_they_do_not_know_of_each_other(name: str, window: int) -> None:
    if window and "window" not in option_types(load_mechanism(name)):
        pytest.skip("it has no window")
    options = resolve_options(name, {"window": window} if window else {})
    why = divides(load_mechanism(name), RECORD, options, 2)
    assert why == ("its heads are computed from each other" if name == "sla" else "")


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("gdn", {"faithful": True}),
        ("gla", {"state_heads": "query"}),
        ("retnet", {"decay": "paper"}),
        ("retnet", {"decay": "spread"}),
        ("mamba2", {"memories": 2, "maps": True}),
        ("gdn", {"native": True, "memories": 2}),
        ("gdn", {"feature_map": "hedgehog", "memories": 2, "window": 4}),
    ],
)
def test_options_divide_too(name: str, options: dict[str, Any]) -> None:
    assert divides(load_mechanism(name), RECORD, resolve_options(name, options), 4) == ""


def test_a_process_has_its_part_of_what_grows_with_heads() -> None:
    kind, options = load_mechanism("gla"), resolve_options("gla", {})
    whole = kind(SITE, **options)
    whole.reset_parameters()
    whole.kind = "gla()"  # as attention_hooks.py writes it
    part = shard(whole, options, 1, 2)
    assert (part.site.heads, part.site.kv_heads, part.kind) == (4, 2, "gla()")
    assert torch.equal(part.narrow.weight, whole.narrow.weight)
    assert torch.equal(part.forget.weight, whole.forget.weight[len(whole.forget.weight) // 2 :])
    assert part.state_bytes(9) == whole.state_bytes(9) // 2


def test_parts_that_compute_something_else_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """As RetNet's would with the decays of a smaller layer, where they are no parameters."""
    made = shards.shard
    monkeypatch.setattr(shards, "shard", lambda *arguments: without_decays(made(*arguments)))
    why = divides(load_mechanism("retnet"), RECORD, resolve_options("retnet", {"decay": "spread"}), 2)
    assert why == "its heads are computed from each other"


def without_decays(part: Any) -> Any:
    """A part with the decays that its own number of heads has."""
    del part.log_decay
    return part


def test_heads_that_do_not_divide_are_named() -> None:
    kind, options = load_mechanism("gla"), resolve_options("gla", {})
    assert divides(kind, RECORD, options, 3) == "8 heads and 4 KV heads are not divided by 3"
    assert divides(kind, RECORD | {"softmax_groups": (1,)}, options, 2) == "some of its heads keep softmax"
    spec = {"all_linear": True, "layers": [{"mechanism": "gla", "options": options, "site": RECORD}]}
    assert shard_spec(spec, 2)["layers"][0]["site"] == RECORD | {"heads": 4, "kv_heads": 2}
