"""Families of architectures: converted, reloaded in a clean process, padded, cached. All types: architectures.py."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from architectures import DOCS, GOAL, causal_types, survey
from conftest import TOLERANCE, relative_error, with_slow
from models import load, logits, small_config

from linearize.probe.probe import found_in

FAMILIES = ("llama", "mistral", "qwen2", "qwen3", "gemma2", "gemma3_text", "olmo2", "olmo3", "granite", "smollm3")
FAMILIES += ("starcoder2", "phi", "phi3", "gpt_neox", "gpt2", "opt", "stablelm", "mixtral", "qwen3_moe", "olmoe")
FAMILIES += ("gpt_oss", "cohere2", "glm4", "ministral", "llama4_text", "deepseek_v3", "qwen3_next", "gpt_bigcode")
# Packed documents meet in the source already: in recurrent layers, or in softmax that is given no mask of documents.
MEETING = {"qwen3_next.all", "gpt_oss.hybrid", "opt.hybrid"}
# One clean process serves several: starting it takes seconds.
FIRST = ["gemma2"]  # masks and scores differ by layer; tests/kernels/test_generation.py has others
SHARES = [FIRST, *([name for name in FAMILIES if name not in FIRST][start::2] for start in range(2))]
EXACT = TOLERANCE[torch.float32]


def test_one_probe_serves_every_folder_of_a_config() -> None:
    one, same, other = (small_config("llama", **changes) for changes in ({}, {}, {"num_attention_heads": 2}))
    same.name_or_path = "elsewhere"
    found = [found_in(config, transformers.LlamaForCausalLM) for config in (one, same, other)]
    assert found[0] is found[1]
    assert found[0] != found[2]


@pytest.mark.parametrize("share", with_slow(SHARES, *SHARES[1:]), ids=" ".join)
def test_families_convert_reload_pad_cache_and_generate(tmp_path: Path, share: list[str]) -> None:
    rows = survey(tmp_path, share)
    assert [(row["type"], row.get("reason")) for row in rows if row["stage"] != "converted"] == []
    for row in rows:
        # qwen3_next: one of four layers has softmax attention; the others stay linear as they are.
        assert row["checked"] == (["all"] if row["type"] == "qwen3_next" else ["all", "hybrid"])
        for layers in row["checked"]:
            model = load(tmp_path / f"{row['type']}.{layers}")
            padding_does_not_matter(model, row["type"])
            steps_continue_a_prefill(model, row["type"])
            if f"{row['type']}.{layers}" not in MEETING:
                packed_documents_do_not_meet(model, row["type"])
            generation_follows_the_logits(model, row["type"])


def some_tokens(*shape: int) -> torch.Tensor:
    """Token ids that no small config uses for padding or for the end."""
    return torch.randint(3, 128, shape, generator=torch.Generator().manual_seed(3))


def padding_does_not_matter(model: Any, name: str) -> None:
    """A row with padding on its left has the logits of the row alone."""
    ids, mask = some_tokens(2, 20), torch.ones(2, 20, dtype=torch.long)
    mask[1, :7] = 0
    # Rotary positions may be shifted. Learned ones may not, and restarts in them look like documents: the weaker test.
    named = {"position_ids": (mask.cumsum(-1) - 1).clamp_min(0)} if name in ("gpt2", "gpt_bigcode") else {}
    padded = logits(model, ids, attention_mask=mask, **named)[1, 7:]
    assert relative_error(padded, logits(model, ids[1:, 7:])[0]) < EXACT, name


def steps_continue_a_prefill(model: Any, name: str) -> None:
    """A prefill and single steps from its cache have the logits of one pass."""
    ids = some_tokens(2, 20)
    with torch.no_grad():
        out = model(input_ids=ids[:, :9], use_cache=True)
        parts = [out.logits]
        for t in range(9, 20):
            out = model(input_ids=ids[:, t : t + 1], past_key_values=out.past_key_values, use_cache=True)
            parts.append(out.logits)
    assert relative_error(torch.cat(parts, 1), logits(model, ids)) < EXACT, name


def packed_documents_do_not_meet(model: Any, name: str) -> None:
    """Also where the architecture tells its masks of documents, but not its attention."""
    ids, places = some_tokens(1, 20), torch.cat([torch.arange(7), torch.arange(13)])[None]
    apart = torch.cat([logits(model, ids[:, :7]), logits(model, ids[:, 7:])], 1)
    assert relative_error(logits(model, ids, position_ids=places), apart) < EXACT, name
    if name in ("llama4_text", "gpt_bigcode"):
        gradients = []
        for change in (model.train, model.gradient_checkpointing_enable):
            change()
            model.zero_grad()
            torch.manual_seed(0)  # for dropout
            model(input_ids=ids, position_ids=places, use_cache=False).logits.square().mean().backward()
            gradients.append(model.get_input_embeddings().weight.grad.clone())
        model.eval().gradient_checkpointing_disable()
        assert relative_error(*gradients) < EXACT, name


def generation_follows_the_logits(model: Any, name: str) -> None:
    """Greedy tokens of a left-padded batch are those that one pass over each row alone would choose."""
    ids, mask = some_tokens(2, 9), torch.ones(2, 9, dtype=torch.long)
    mask[1, :4] = 0
    made = model.generate(ids, attention_mask=mask, max_new_tokens=6, min_new_tokens=6, do_sample=False, pad_token_id=1)
    assert made.shape == (2, 15), name
    for row, start in ((0, 0), (1, 4)):
        choice = logits(model, made[row : row + 1, start:-1])[0, -6:]
        choice[:, model.generation_config.eos_token_id or []] = -torch.inf
        assert torch.equal(choice.argmax(-1), made[row, 9:]), name


def test_the_list_of_architectures_is_of_this_transformers() -> None:
    text = DOCS.read_text("utf-8")
    written = re.search(r"transformers ([\d.]+)", text)
    assert written is not None
    if written[1] != transformers.__version__:
        pytest.skip(f"written with transformers {written[1]}")
    listed = re.findall(r"^\| ([\w.-]+) \| ", text, re.MULTILINE)
    assert sorted(name for name in listed if name != "type") == sorted(causal_types())
    passing = re.search(r"\*\*(\d+) of (\d+) types pass", text)
    assert passing is not None
    assert int(passing[1]) >= GOAL
