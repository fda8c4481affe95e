"""The demo: choose layers, convert, distil a hybrid and an all-linear student on the CPU, and compare them with the
teacher."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from rich.columns import Columns
from rich.live import Live
from rich.panel import Panel

from ..checkpoint.manifest import read_plan
from ..checkpoint.provenance import check_code_cache
from ..commands.convert import plan_table
from ..finetune import finetune
from ..job.source import plan_base
from ..measure.compare import read_blocks
from ..measure.generate import load
from ..measure.recall import Writer, rows_of, score
from ..recipe.recipe import Recipe, load_recipe
from ..terminal.output import nats, percent, size
from ..terminal.tables import console, table
from ..verify.reload import clean_command, result_of, started
from . import model_folder

Say = Callable[[str], None]
NEW_TOKENS = 80
NEEDLE, NEEDLES = 256, 64  # tokens of a text that hides a needle, and how many there are
CACHED = (512, 32768)
# What the demo changes in its preset: a window beside the memory, and budgets for minutes on two cores.
SETTINGS = (
    "convert.options={slots: 64, state_heads: query, window: 64, sink: 1, clock: 0, half_life_min: 32}",
    "stages.attention_transfer.tokens=16k",
    "stages.logit_kl.tokens=24k",
    "stages.logit_kl.optimizer.lr=5e-5",
    "eval.max_tokens=8192",
)

# Runs where linearize cannot be imported: one model after the other, a JSON line per piece of text.
WRITE = """
from transformers import AutoModelForCausalLM, AutoTokenizer, TextStreamer
folders, prompt, count = json.loads(sys.argv[1]), sys.argv[2], int(sys.argv[3])

class Stream(TextStreamer):
    def on_finalized_text(self, text, stream_end=False):
        print(json.dumps({"who": who, "text": text}), flush=True)

for who, folder in folders.items():
    tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=True)
    model = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True, dtype=torch.float32)
    torch.manual_seed(0)
    inputs = tokenizer(prompt, return_tensors="pt", return_token_type_ids=False)
    style = {"do_sample": True, "temperature": 0.8, "top_p": 0.95, "repetition_penalty": 1.15}
    model.generate(**inputs, max_new_tokens=count, streamer=Stream(tokenizer, skip_special_tokens=True), **style)
"""


def tour(output: Path | None, prompt: str, say: Say) -> dict[str, Any]:
    """Run the demo. Returns the `choice` of layers, the report of each student's run, what was `compared`, and the
    continuations under `samples`."""
    check_code_cache()  # before the minute in which layers are chosen
    with tempfile.TemporaryDirectory() as scratch:
        folder = output or Path(scratch) / "demo"
        plan = plan_base(load_recipe("demo", [*SETTINGS, "convert.keep_softmax=auto:2"]), say=say)[0]
        plan_table(plan)
        kept = ",".join(str(site.layer) for site in plan.kept)
        result: dict[str, Any] = {"choice": plan.to_json()["choice"]}
        for name, layers in (("hybrid", kept), ("linear", "")):
            where = f"output_dir={json.dumps(str(folder / name))}"
            own = [f"name=demo-{name}", where, f"convert.keep_softmax={json.dumps(layers)}"]
            own += ["finish.verify=false"] * (name == "linear")  # the code that the hybrid's check ran
            recipe = load_recipe("demo", [*SETTINGS, *own])
            say(f"distilling the {name} student" + (f": softmax stays in layers {layers}" if layers else ""))
            result[name] = finetune(recipe, say=say)
        folders = {"teacher": model_folder(), **{name: folder / name / "final" for name in ("hybrid", "linear")}}
        result["samples"] = side_by_side(folders, prompt, say)
        result["compared"] = compared(recipe, folders, result)
        demo_table(result["compared"], kept)
        if output is None:
            say(f"{folder} is temporary and is removed now. linearize demo -o DIR keeps the models")
    return result


def compared(recipe: Recipe, folders: Mapping[str, Path], reports: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Teacher and students, by name: perplexity on held-out text, its ratio to the teacher's, KL from it, the share of
    needles found, and bytes of the cache (the plan's count, in `dtype`) by tokens of text."""
    found: dict[str, dict[str, Any]] = {
        "teacher": {"ppl": reports["hybrid"]["teacher_ppl"], "ppl_ratio": 1.0, "kl": 0.0}
    }
    rows = None
    for name, folder in folders.items():
        loaded = load(str(folder), None, device="auto", dtype="float32", teacher=False, trust_remote_code=False)
        if rows is None:
            with tempfile.TemporaryDirectory() as cache:
                blocks = read_blocks(recipe, loaded.tokenizer, Path(cache))
                text = [token for number in range(len(blocks)) for token in blocks[number]["input_ids"].tolist()]
            rows = rows_of("needle", Writer(loaded.tokenizer, recipe.seed), NEEDLE, NEEDLES, text)
        if name in reports:
            last, plan = reports[name]["stages"][-1], read_plan(folder)
            found[name] = {key: last[key] for key in ("ppl", "ppl_ratio", "kl")}
            found[name]["dtype"] = found["teacher"]["dtype"] = plan.dtype
            found[name]["cache"] = {tokens: plan.cache_bytes(tokens)["converted"] for tokens in CACHED}
            found["teacher"]["cache"] = {tokens: plan.cache_bytes(tokens)["source"] for tokens in CACHED}
        found[name]["needle"] = score(loaded.model, rows, 16)["accuracy"]
    return found


def side_by_side(folders: Mapping[str, Path], prompt: str, say: Say) -> dict[str, str]:
    """Continuations by each model, streamed from a clean process that cannot import linearize.

    Raises LinearizeError (exit 6) when it fails.
    """
    say("reloading the saved models in a process without linearize; each continues the prompt:")
    arguments = [json.dumps({name: str(folder) for name, folder in folders.items()}), prompt, str(NEW_TOKENS)]
    texts = dict.fromkeys(folders, "")
    with clean_command(WRITE, arguments) as command, started(*command) as process:
        assert process.stdout is not None
        with Live(console=console(), transient=False, refresh_per_second=8) as live:
            for line in process.stdout:
                piece = json.loads(line)
                texts[piece["who"]] += piece["text"]
                live.update(Columns([Panel(texts[who], title=who, width=58) for who in texts]))
        if not live.console.is_terminal:  # there the last picture lacks the end of its line
            live.console.line()
        result_of(process)
    return texts


def demo_table(found: dict[str, dict[str, Any]], kept: str) -> None:
    """The demo's teacher and students side by side, by what `linearize.demo.tour.compared` found."""
    distances = ("" if who == "teacher" else nats(one["kl"]) for who, one in found.items())
    rows = [
        ("perplexity", *(f"{one['ppl']:.3f}" for one in found.values())),
        ("x teacher", *(f"{one['ppl_ratio']:.3f}" for one in found.values())),
        ("KL from the teacher, nats a token", *distances),
        ("needles found", *(percent(one["needle"]) for one in found.values())),
    ]
    for tokens in found["teacher"]["cache"]:
        sizes = (size(one["cache"][tokens]) for one in found.values())
        rows.append((f"cache at {tokens:,} tokens, {found['teacher']['dtype']}", *sizes))
    columns = {"": "text"} | dict.fromkeys(("teacher", f"softmax in {kept}", "all linear"), "number")
    console().print(table(columns, rows, "teacher and students, on Python that none was trained on"))
