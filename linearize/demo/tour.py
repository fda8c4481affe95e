"""The demo: plan, convert, distil on the CPU, compare, and generate text with teacher and student side by side."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rich.columns import Columns
from rich.live import Live
from rich.panel import Panel

from ..finetune import finetune, plan_base
from ..recipe.recipe import load_recipe
from ..terminal.tables import console, plan_table, report_table
from ..verify.reload import clean_command, result_of, started
from . import model_folder

Say = Callable[[str], None]
NEW_TOKENS = 80

# Runs where linearize cannot be imported: teacher, then student, a JSON line per piece of text.
WRITE = """
from transformers import AutoModelForCausalLM, AutoTokenizer
teacher, student, prompt, count = sys.argv[1], sys.argv[2], sys.argv[3], int(sys.argv[4])

class Stream:
    def __init__(self, who, tokenizer):
        self.who, self.tokenizer, self.ids, self.said = who, tokenizer, [], ""

    def put(self, ids):
        self.ids += ids.flatten().tolist()
        text = self.tokenizer.decode(self.ids, skip_special_tokens=True)
        print(json.dumps({"who": self.who, "text": text[len(self.said):]}), flush=True)
        self.said = text

    def end(self):
        pass

for who, folder in (("teacher", teacher), ("student", student)):
    tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=True)
    model = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True, dtype=torch.float32)
    torch.manual_seed(0)
    inputs = tokenizer(prompt, return_tensors="pt", return_token_type_ids=False)
    style = {"do_sample": True, "temperature": 0.8, "top_p": 0.95, "repetition_penalty": 1.15}
    model.generate(**inputs, max_new_tokens=count, streamer=Stream(who, tokenizer), **style)
"""


def tour(output: Path | None, prompt: str, say: Say) -> dict[str, Any]:
    """Run the demo; returns the report of its run, with the continuations under `samples`."""
    with tempfile.TemporaryDirectory() as scratch:
        folder = output or Path(scratch) / "demo"
        recipe = load_recipe("demo", [f"output_dir={json.dumps(str(folder))}"])
        plan_table(plan_base(recipe)[0])
        report = finetune(recipe, say=say)
        report_table(report)
        report["samples"] = side_by_side(folder / "final", prompt, say)
        if output is None:
            say(f"{folder} is temporary and is removed now. linearize demo -o DIR keeps the model")
    return report


def side_by_side(student: Path, prompt: str, say: Say) -> dict[str, str]:
    """Continuations by teacher and student, streamed from a clean process that cannot import linearize.

    Raises LinearizeError (exit 6) when it fails.
    """
    say("reloading the saved model in a process without linearize; both continue the prompt:")
    arguments = [str(model_folder()), str(student), prompt, str(NEW_TOKENS)]
    texts = {"teacher": "", "student": ""}
    with clean_command(WRITE, arguments) as command, started(*command) as process:
        assert process.stdout is not None
        with Live(console=console(), transient=False, refresh_per_second=8) as live:
            for line in process.stdout:
                piece = json.loads(line)
                texts[piece["who"]] += piece["text"]
                live.update(Columns([Panel(texts[who], title=who, width=58) for who in texts]))
        result_of(process)
    return texts
