"""Every causal type that transformers registers: small random models of them, converted, reloaded, compared.

python tests/architectures.py check     all of them; fails where docs/architectures.md says something else
python tests/architectures.py write     writes docs/architectures.md
python tests/architectures.py TYPE ...  these only, printed
"""

from __future__ import annotations

import concurrent.futures
import datetime
import difflib
import json
import multiprocessing
import re
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import clean_env
import torch
import transformers
from encoders import ENCODERS, WITHOUT_GRID
from models import source_with_mixers
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from linearize.convert import convert, plan_conversion
from linearize.errors import LinearizeError

VOCAB = 128
# Size fields by name, whatever the architecture; one that a config lacks is left out.
SIZES: dict[int, str] = {
    VOCAB: "vocab_size vocab_size_per_layer_input n_vocab",
    256: "max_position_embeddings n_positions n_ctx max_sequence_length max_seq_len",
    48: """intermediate_size ffn_dim decoder_ffn_dim encoder_ffn_dim n_inner d_ff ffn_hidden_size dff
        moe_intermediate_size shared_expert_intermediate_size expert_ffn_hidden_size mlp_hidden_size feed_forward_size
        intermediate_size_mlp block_ff_dim""",
    32: """hidden_size d_model n_embd n_embed dim emb_dim embed_dim embedding_size word_embed_proj_dim lru_width
        decoder_hidden_size attention_hidden_size backbone_hidden_size image_size""",
    16: "qk_head_dim q_lora_rank kv_lora_rank o_lora_rank patch_size",
    8: """head_dim kv_channels attention_head_dim global_head_dim v_head_dim qk_nope_head_dim qk_rope_head_dim
        linear_key_head_dim linear_value_head_dim linear_head_dim index_head_dim swa_head_dim""",
    6: "sliding_window local_window_size attention_window_size local_attention",
    4: """num_hidden_layers n_layer n_layers num_layers decoder_layers encoder_layers num_decoder_layers
        num_attention_heads n_head n_heads num_heads decoder_attention_heads encoder_attention_heads
        num_decoder_attention_heads linear_num_value_heads linear_num_heads rotary_dim
        num_experts num_local_experts n_routed_experts moe_num_experts zero_expert_num""",
    2: """num_key_value_heads num_kv_heads multi_query_group_num linear_num_key_heads num_experts_per_tok
        num_experts_per_token moe_topk moe_k top_k_experts
        full_attention_interval n_mamba_heads mamba_n_heads mamba_num_heads""",
    1: "n_group num_expert_group topk_group first_k_dense_replace",
}
SMALL: dict[str, Any] = {name: size for size, names in SIZES.items() for name in names.split()}
# Those that are set even where the default config leaves them open.
UNSET = {"head_dim", "num_key_value_heads", "n_routed_experts", "num_experts", "num_experts_per_tok", "n_group"}
UNSET |= {"moe_intermediate_size", "topk_group", "linear_num_value_heads", "linear_num_key_heads"}
# What the sizes above do not settle: layer patterns, and fields that a class needs and its defaults leave out.
MIXED = {"layer_types": ["linear_attention", "full_attention"] * 2}
SHARED = {"num_hidden_layers": 6, "layers_block_type": ["linear_attention", "linear_attention", "hybrid"] * 2}
SHARED |= {"attention_hidden_size": 64, "attention_head_dim": 16}
# The last two layers read keys of the third and the fourth.
KV_SHARED = {"num_hidden_layers": 6, "num_kv_shared_layers": 2}
KV_SHARED |= {"layer_types": ["sliding_attention", "full_attention"] * 3}
ROPE = {"rope_type": "default", "rope_theta": 1e4}
OVERRIDES: dict[str, dict[str, Any]] = {
    "bailing_hybrid": {"layer_group_size": 2, **MIXED},
    "bamba": {"attn_layer_indices": [1, 3]},
    "cohere_compass_text": {"rope_parameters": {"full_attention": ROPE, "sliding_attention": ROPE}},
    "dbrx": {
        "attn_config": {"kv_n_heads": 2, "rope_theta": 1e4, "clip_qkv": 8.0},
        "ffn_config": {"ffn_hidden_size": 48, "moe_num_experts": 4, "moe_top_k": 2},
    },
    "dots1": {"n_shared_experts": 1},
    "gemma3n_text": {"intermediate_size": 48, **KV_SHARED},
    "gemma4_text": KV_SHARED,
    "gpt_neo": {"attention_types": [[["global", "local"], 2]], "window_size": 6},
    "granitemoehybrid": {"layer_types": ["mamba", "attention"] * 2},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "kimi_linear": MIXED,
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * 2, "num_dense_layers": 1},
    "nemotron_h": {
        "layers_block_type": ["linear_attention", "full_attention", "mlp", "full_attention"],
        **{"mamba_num_heads": 8, "mamba_head_dim": 8, "n_groups": 2},
    },
    "qwen4_exp_text": {
        "layer_types": ["linear_attention", "indexed_attention"] * 2,
        **{"indexer_n_heads": 2, "indexer_kv_heads": 1, "indexer_head_dim": 8, "indexer_budget": 8},
        **{"indexer_compress_ratio": 2, "ngram_vocab_size_base": 128},
    },
    "xmod": {"default_language": "en_XX"},
    "zamba": SHARED,
    "zamba2": {**SHARED, "n_mamba_heads": 8},
    "zaya": {"num_experts_per_tok": 1},
}


def causal_types() -> dict[str, str]:
    """Model type -> the name of its class with a language-model head, for every type of transformers."""
    return {t: n[0] if isinstance(n, (tuple, list)) else n for t, n in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.items()}


def shrunk(kind: Any) -> dict[str, Any]:
    """Arguments that make a small config of class `kind`."""
    config = kind()
    values = config.to_dict()
    layers = next((v for k, v in values.items() if SMALL.get(k) == 4 and "layer" in k and type(v) is int), None)
    arguments = {}
    for name, value in values.items():
        if name in config.sub_configs and isinstance(value, dict):
            part = (
                CONFIG_MAPPING[value["model_type"]]
                if value.get("model_type") in CONFIG_MAPPING
                else config.sub_configs[name]
            )
            arguments[name] = {"model_type": value.get("model_type"), **shrunk(part)}
        elif name.endswith("token_id") and isinstance(value, int):
            arguments[name] = 1 if name.startswith("pad") else value if value < VOCAB else 2
        elif name.endswith("token_id") and isinstance(value, list):
            arguments[name] = 2
        elif name in SMALL and ((type(value) is int and value > 0) or (value is None and name in UNSET)):
            arguments[name] = SMALL[name]
        elif isinstance(value, list) and len(value) == layers and getattr(kind, name, None) is not None:
            arguments[name] = value[:4]
    if values.get("kv_lora_rank"):
        arguments["num_key_value_heads"] = 4
    if "is_decoder" in values:
        arguments["is_decoder"] = True
    if "initializer_range" in values:
        arguments["initializer_range"] = 0.3
    return arguments


def small_config(model_type: str) -> Any:
    """A small config of a model type, or of a class of encoders.py."""
    model_type, changes = (ENCODERS | WITHOUT_GRID).get(model_type, (model_type, OVERRIDES.get(model_type, {})))
    kind = CONFIG_MAPPING[model_type]
    return kind(**{**shrunk(kind), **changes})


def small_model(model_type: str) -> Any:
    """A random model of the type, or of a class of encoders.py, in eval mode; always the same."""
    torch.manual_seed(11)
    if model_type in ENCODERS | WITHOUT_GRID:
        return getattr(transformers, model_type)(small_config(model_type)).eval()
    return transformers.AutoModelForCausalLM.from_config(small_config(model_type)).eval()


# ---------------------------------------------------------------- one type, from random weights to a verdict

OPTIONS = {"slots": 8, "chunk_size": 16}
# Of the mechanisms that encoders are converted to.
SMALL_OPTIONS: dict[str, dict[str, Any]] = {"gsa": OPTIONS, "saga": {"dwc": 3}, "la": {}}
SMALL_OPTIONS["mhla"] = {"dwc": 3, "output_gate": True}
LAYERS = {"all": "all", "hybrid": "every:2"}


def prepare(folder: Path, model_type: str, mechanism: str, hybrid: bool) -> dict[str, Any]:
    """Convert a small model of the type, all-linear and `hybrid`, into `folder`, with what each must compute.

    Returns {type, stage, ...}: `stage` is where it ended, "converted" when all went well.
    """
    row: dict[str, Any] = {"type": model_type, "stage": "no small instance"}
    try:
        model = small_model(model_type)
        row |= {"class": type(model).__name__, "stage": "the source does not run"}
        teacher = clean_env.compute(model, steps=False)["whole"]
        source = folder / f"{model_type}.source"
        model.save_pretrained(source)
        for name, layers in [*LAYERS.items()][: 1 + hybrid]:
            row["stage"] = "refused"
            plan, row["consent"] = plan_with_consent(source, layers, mechanism)
            sites = [step.site for step in plan[0].steps]
            row.setdefault("sites", len(sites))
            row.setdefault("kinds", sorted({site.kind for site in sites}))
            row.setdefault("drops", sorted({extra for site in sites for extra in site.extras}))
            if name != "all" and len(sites) == row["sites"]:
                continue
            row["stage"] = f"{name} does not convert"
            place = folder / f"{model_type}.{name}"
            convert(*plan, place, level="none", say=lambda text: None)
            row["stage"] = f"{name} does not run"
            logits = clean_env.compute(source_with_mixers(source, place))
            assert (logits["whole"] - teacher).abs().max() > 1e-3 * teacher.abs().max(), "nothing changed"
            clean_env.expect(place, {**logits, "teacher": teacher})
        row["stage"] = "converted"
    except Exception as error:  # the reason is the result
        said = str(error).strip()
        row["reason"] = said if isinstance(error, LinearizeError) else f"{type(error).__name__}: {said}"
    return row


def plan_with_consent(source: Path, layers: str, mechanism: str) -> tuple[Any, list[str]]:
    """A plan, and the names that --allow-drop had to be given for it."""
    options = SMALL_OPTIONS[mechanism]
    try:
        return plan_conversion(str(source), mechanism, layers=layers, options=options), []
    except LinearizeError as error:
        consent = sorted(set(re.findall(r"--allow-drop (\w+)", error.message)))
        if not consent:
            raise
        return plan_conversion(str(source), mechanism, layers=layers, options=options, allow_drop=consent), consent


def survey(
    folder: Path, types: list[str], mechanism: str = "gsa", hybrids: tuple[str, ...] | None = None
) -> list[dict[str, Any]]:
    """A row per type: prepared here, then all of them reloaded and compared in one clean process.

    `hybrids` are the types of which every second layer is converted as well; None: all of them.
    """
    rows = {t: prepare(folder, t, mechanism, hybrids is None or t in hybrids) for t in types}
    for line in clean_env.in_clean_process(folder, "survey"):
        name, failure = json.loads(line)
        model_type, _, layers = name.rpartition(".")
        row = rows[model_type]
        row.setdefault("checked", []).append(layers)
        if failure and row["stage"] == "converted":
            row |= {"stage": f"{layers} reloads differently", "reason": failure}
    return list(rows.values())


# ---------------------------------------------------------------- all types, and what is written about them

DOCS = Path(__file__).parent.parent / "docs" / "architectures.md"
GOAL = 130
STAMP = "Written by"


def survey_all(types: list[str], workers: int = 2) -> list[dict[str, Any]]:
    """`survey` in several processes; each shares one clean process among its share of types."""
    shares = [types[start::4] for start in range(4) if types[start::4]]
    context = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(workers, mp_context=context) as pool:
        rows = [row for share in pool.map(_share, shares) for row in share]
    return sorted(rows, key=lambda row: row["type"])


def _share(types: list[str]) -> list[dict[str, Any]]:
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    clean_env.remember_imports()
    with tempfile.TemporaryDirectory() as folder:
        return survey(Path(folder), types)


def document(rows: list[dict[str, Any]]) -> str:
    """docs/architectures.md for these rows."""
    passed = [row for row in rows if row["stage"] == "converted"]
    stamp = f"{STAMP} `make architectures-docs`: transformers {transformers.__version__}, torch {torch.__version__}, "
    lines = ["# Architectures", "", INTRODUCTION, "", stamp + f"{datetime.date.today():%Y-%m-%d}.", ""]
    lines += [f"**{len(passed)} of {len(rows)} types pass.**", "", "## Types that pass", ""]
    lines += ["| type | class | attention modules | converted | softmax also has |", "|---|---|---|---|---|"]
    for row in passed:
        drops = ", ".join(f"**{name}**" if name in row["consent"] else name for name in row["drops"])
        cells = (row["class"], ", ".join(row["kinds"]), " and ".join(row["checked"]), drops)
        lines.append(f"| {row['type']} | {' | '.join(cells)} |")
    lines += ["", NOTE, "", "## Types that do not", ""]
    lines += ["| type | what happens | reason |", "|---|---|---|"]
    for row in rows:
        if row["stage"] != "converted":
            lines.append(f"| {row['type']} | {row['stage']} | {_reason(row['reason'])} |")
    return "\n".join(lines) + "\n"


NOTE = """`all` alone: the small instance has one layer with softmax attention. What else softmax has is dropped, what
is in bold only with `--allow-drop`."""
INTRODUCTION = """Every model type for which transformers registers a causal language model, tried on a small random
instance: its sizes made small by name (`tests/architectures.py`), its weights random, converted to `gsa` with all
softmax layers linear and with every second one, saved, and loaded in a clean process that has neither linearize nor
its kernels. There the logits of a left-padded batch, of a prefill with single steps, and of the softmax teacher must
equal those of the source class with the same mixers, and of the source. No type has code of its own here."""


def _reason(text: str) -> str:
    """One line of an error, without folders of this run, for a table cell."""
    line = re.sub(r"\S*/(\w[\w.-]*)", r"\1", " ".join(text.split()))
    line = line.replace("|", "\\|")
    return line if len(line) <= 240 else line[:237] + "..."


def _without_stamp(text: str) -> list[str]:
    return [line for line in text.splitlines() if not line.startswith(STAMP)]


def main(arguments: list[str]) -> int:
    started, write, check = time.time(), arguments == ["write"], arguments == ["check"]
    rows = survey_all(sorted(causal_types()) if write or check else arguments)
    passed = [row for row in rows if row["stage"] == "converted"]
    print(f"{len(passed)} of {len(rows)} types pass, {time.time() - started:.0f} s")
    text = document(rows)
    if write:
        DOCS.write_text(text, "utf-8")
        return 0
    if not check:
        print(text)
        return len(rows) - len(passed)
    old, new = _without_stamp(DOCS.read_text("utf-8")), _without_stamp(text)
    print("\n".join(difflib.unified_diff(old, new, "docs/architectures.md", "this run", lineterm="")))
    # Another version has other types and other reasons; it owes the goal, not the list.
    listed = f"transformers {transformers.__version__}, " in DOCS.read_text("utf-8")
    return int((listed and old != new) or len(passed) < GOAL)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
