"""The model card: what the checkpoint is, where it comes from, how to load it, what was measured."""

from __future__ import annotations

import contextlib
import datetime
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import transformers
import yaml
from huggingface_hub import EvalResult, ModelCard, ModelCardData, metadata_load

from .. import __version__
from ..errors import redact
from ..plan.keep import written
from ..plan.mechanisms import to_settings
from ..plan.plan import Plan
from ..recipe.data import DatasetSource, DemoSource, FileSource, holds_images, unit_of
from ..recipe.recipe import Recipe, portable
from ..terminal.output import layers_named, markdown_table
from ..terminal.tables import evaluation_figures, note_of_rows, position_rows, row_name, task_rows
from ..train.device import on_cpu
from .carried import is_licence, sentence_files
from .code import auto_names
from .source import read_json
from .tokenizer import FILE as TOKENIZER

CARD = Path(__file__).with_name("card.md").read_text("utf-8").removesuffix("\n")

PICTURES = "pictures"  # the folder beside the card
PLACE = 'name = "."  # the folder with these files'
# Where LoRA was not merged: what is measured below is with it.
ADAPTER = """
from peft import PeftModel

model = PeftModel.from_pretrained(model, name, subfolder="adapter")
"""
# Where the source has the files of sentence-transformers.
SENTENCES = """
As a sentence encoder, with the source's pooling:

```python
from sentence_transformers import SentenceTransformer

model = SentenceTransformer(name, trust_remote_code=True)
```
"""
UNTRAINED = "The new parameters are untrained: distil before use."
# The task on the Hub, by the class that loads the model.
PIPELINES = {
    "AutoModelForCausalLM": "text-generation",
    "AutoModelForImageClassification": "image-classification",
    "AutoModelForMaskedLM": "fill-mask",
}
# The Hub's names of licences, and how their texts begin.
LICENCES = {
    "apache-2.0": r"Apache License\s+Version 2\.0",
    "mit": r"\AMIT License|Permission is hereby granted, free of charge",
    "bsd-3-clause": r"BSD 3-Clause License",
}
# What a model inherits from the one that it was made of.
INHERITED = ("license", "license_name", "license_link", "language")


def model_card(
    plan: Plan,
    origin: Path,
    recipe: Recipe | None = None,
    report: dict[str, Any] | None = None,
    pictures: Mapping[str, str] | None = None,
) -> str:
    """README.md of a model made of the one in folder `origin`; `recipe` and `report` are those of its training.

    `pictures` are names of files in the folder PICTURES, and what they show.
    """
    mechanisms = sorted({step.mechanism for step in plan.linear})
    notes = "".join(f"\n- dropped: {note}" for note in plan.notes)
    shown = "".join(f"\n![{about}]({PICTURES}/{name})\n" for name, about in (pictures or {}).items())
    text = CARD.format(
        metadata=metadata(plan, origin, recipe, report),
        base=f"[`{plan.source}`](https://huggingface.co/{plan.source})" if on_hub(plan) else f"`{plan.source}`",
        source=plan.source,
        name=plan.source.rpartition("/")[2],
        mechanisms=", ".join(m.upper() for m in mechanisms),
        layers=layers_named(step.site.layer for step in plan.linear),
        kept=kept_heads(plan) + (f"; {plan.softmax}" if plan.softmax else ""),
        version=__version__,
        training=untrained(plan) if recipe is None else trained(recipe, report),
        place=PLACE,
        revision=f" at `{plan.revision}`" if plan.revision else "",
        architecture=plan.architecture,
        new_parameters=plan.new_parameters,
        decoding=decoding(plan),
        **loading(plan),
        trust="" if tokenizer_alone(plan, origin) else ", trust_remote_code=True",
        adapter=ADAPTER if recipe is not None and recipe.keeps_adapter else "",
        sentences=SENTENCES if sentence_files(origin) else "",
        options=options_text(plan),
        notes=notes + "\n" if notes else "",
        results="" if recipe is None or report is None else measured(recipe, report) + shown + recipe_text(recipe),
    )
    return redact(text)


def plain_card(recipe: Recipe, report: dict[str, Any]) -> str:
    """README.md of a model that was trained from random weights and keeps its softmax."""
    text = (
        f"# {recipe.name}\n\nA model of transformers with softmax attention in all layers, from random weights. "
        f"{trained(recipe, report)}\n{measured(recipe, report)}{recipe_text(recipe)}"
    )
    return redact(text)


def kept_heads(plan: Plan) -> str:
    """The heads of linear layers that keep softmax, to stand behind these layers; empty where none does."""
    if not plan.softmax_groups:
        return ""
    return f", but for the KV heads (layer:head) `{written(plan.softmax_groups)}`, which keep softmax"


def untrained(plan: Plan) -> str:
    """Which parts of the model are untrained. If it was converted again, also what was trained before."""
    if not plan.reconversions:
        return UNTRAINED
    last = plan.reconversions[-1]
    new = [step.site.layer for step in plan.steps if step.site.path in last.untrained]
    back = [site.layer for site in plan.kept if site.path in last.restored]
    have = "has" if len(back) == 1 else "have"
    changes = [f"{layers_named(back)} {have} softmax again"] if back else []
    changes += [f"the new parameters of {layers_named(new)} are untrained: distil before use"] if new else []
    by = f", trained with the recipe {last.recipe.get('name')}," if last.recipe else ""
    return f"Converted again from `{last.folder}`{by} whose other weights it has: {'; '.join(changes)}."


def options_text(plan: Plan) -> str:
    """The options of the linear layers, as --set takes them: once where all have the same, else by layers what differs
    from the first's."""
    first, others = plan.linear[0].options, dict[str, list[int]]()
    for step in plan.linear:
        changed = {name: value for name, value in step.options.items() if first.get(name) != value}
        if changed:
            others.setdefault(", ".join(to_settings(changed)), []).append(step.site.layer)
    rest = (f"{layers_named(layers)}: `{text}`" for text, layers in others.items())
    return "; ".join([f"`{', '.join(to_settings(first))}`", *rest])


def decoding(plan: Plan) -> str:
    """A row of the table on the decode state, where there is one."""
    state = sum(step.state_bytes for step in plan.steps)
    exact = [name for name, there in (("layers", plan.kept), ("heads", plan.softmax_groups)) if there]
    kv = f" (plus the KV cache of the softmax {' and '.join(exact)})" if exact else ""
    return f"| decode state per sequence, {plan.dtype} | {state:,} bytes, whatever the length{kv} |\n" if state else ""


def loading(plan: Plan) -> dict[str, str]:
    """Names in the lines of code that load the model and what makes its inputs."""
    head = getattr(transformers, plan.architecture, None)
    auto = "AutoModelForCausalLM" if head is None else auto_names(head.config_class, head)[0]
    made = {
        "pixel_values": "image_processor",
        "input_features": "feature_extractor",
        "input_values": "feature_extractor",
    }
    processor = made.get(getattr(head, "main_input_name", ""), "tokenizer")
    loader = "Auto" + processor.title().replace("_", "")
    return {"auto": auto, "processor": processor, "loader": loader, "imports": ", ".join(sorted((auto, loader)))}


def tokenizer_alone(plan: Plan, origin: Path) -> bool:
    """Whether what makes the inputs is a tokenizer without code of its own, so that none has to be trusted."""
    path = origin / TOKENIZER
    return loading(plan)["processor"] == "tokenizer" and not (path.is_file() and read_json(path).get("auto_map"))


def on_hub(plan: Plan) -> bool:
    """Whether the source came from the Hub, and so has a name there: a local folder has no commit."""
    return plan.revision is not None


def metadata(plan: Plan, origin: Path, recipe: Recipe | None, report: dict[str, Any] | None) -> str:
    """The YAML at the top of a card, which the Hub reads.

    The relation to the base is `finetune`, of the Hub's four: all weights are here, so it is no adapter, none is
    quantized, and it has one parent, so it is no merge.
    """
    base: dict[str, Any] = {"base_model": plan.source, "base_model_relation": "finetune"} if on_hub(plan) else {}
    results = [] if recipe is None or report is None else evaluations(recipe, report)
    data = ModelCardData(
        **base,
        **inherited(origin),
        library_name="sentence-transformers" if sentence_files(origin) else "transformers",
        pipeline_tag="sentence-similarity" if sentence_files(origin) else PIPELINES.get(loading(plan)["auto"]),
        tags=["linear-attention", "linearize", *sorted({step.mechanism for step in plan.linear})],
        datasets=datasets(recipe) or None,
        model_name=recipe.name if recipe and results else None,
        eval_results=results or None,
    )
    return data.to_yaml().strip()


def inherited(folder: Path) -> dict[str, Any]:
    """Licence and languages from the metadata of the card in `folder`; nothing from one that cannot be read."""
    data: Any = None
    with contextlib.suppress(OSError, ValueError, yaml.YAMLError):
        data = metadata_load(folder / "README.md")
    found = {key: data.get(key) for key in INHERITED} if isinstance(data, dict) else {}
    if not found.get("license"):
        found |= of_licence_file(folder)
    return {
        key: value
        for key, value in found.items()
        if isinstance(value, str) or (isinstance(value, list) and all(isinstance(item, str) for item in value))
    }


def of_licence_file(folder: Path) -> dict[str, str]:
    """The licence by the file that goes along, where the source's card names none; empty without a file."""
    for path in sorted(path for path in folder.iterdir() if is_licence(path) and path.is_file()):
        if path.name.upper().startswith("LICEN"):
            text = path.read_text("utf-8", "replace")[:2000]
            known = next((name for name, mark in LICENCES.items() if re.search(mark, text)), None)
            return {"license": known} if known else {"license": "other", "license_link": path.name}
    return {}


# ---------------------------------------------------------------- after training


def trained(recipe: Recipe, report: dict[str, Any] | None = None) -> str:
    """One sentence, and another on a teacher that is not the source."""
    stages = "; ".join(f"{stage.kind} of {', '.join(stage.train)}" for stage in recipe.stages)
    text = f"Trained with `linearize finetune` ({recipe.name}): {stages}."
    teacher = (report or {}).get("teacher")
    if not teacher:
        return text
    at = f", commit `{teacher['commit']}`" if teacher["commit"] else ""
    top = f", of whose predictions the {teacher['top']} likeliest tokens were kept" if "top" in teacher else ""
    return f"{text} Logits are those of `{teacher['model']}`{at} (sha256 `{teacher['sha256'][:16]}`){top}."


def measured(recipe: Recipe, report: dict[str, Any]) -> str:
    """The table of perplexities, of images with accuracies before them, of maps of how far they are from the teacher's;
    below it what the run told. Empty without held-out data."""
    rows, teacher = report["stages"], report["teacher_ppl"]
    if not rows:
        return ""
    device = "CPU" if on_cpu(recipe) else torch.cuda.get_device_name()
    unit = unit_of(recipe.data.train)

    def line(name: str, trained: str, row: dict[str, Any]) -> tuple[str, ...]:
        return name, trained, _count(row["eval_tokens"]), *evaluation_figures(row, unit, ".4g").values()

    found, columns = list[tuple[str, ...]](), evaluation_figures(rows[0], unit, ".4g")
    if teacher is not None:
        who = f"teacher ({report['teacher']['model']})" if report.get("teacher") else "teacher (softmax)"
        own = {"ppl": teacher, "ppl_ratio": 1.0, "accuracy": report.get("teacher_accuracy")}
        found.append(line(who, "", own | {"eval_tokens": rows[0]["eval_tokens"]}))
    found += [line(row_name(row["name"], row.get("calibrated")), f"{row['tokens']:,}", row) for row in rows]
    lines = ["", "## Measured", "", *markdown_table(("", f"training {unit}", f"held-out {unit}", *columns), found)]
    lines += by_position(report.get("positions"))
    versions = f"torch {torch.__version__}, transformers {transformers.__version__}"
    # What the recipe below does not say.
    few = f" --max-steps {report['max_steps']}" if report.get("max_steps") else ""
    made = f"`linearize finetune{few}`, {device}, {versions}, {datetime.date.today()}."
    rows_differ = note_of_rows(rows, teacher).removeprefix("note: ")
    notes = [*filter(None, [rows_differ]), *report.get("notes", ())]
    return "\n".join([*lines, "", made, *[f"\n- {note}" for note in notes], ""])


def by_position(found: dict[str, Any] | None) -> list[str]:
    """A table of perplexity and KL by position in texts, past the length of training; empty where none was made."""
    if not found or not found["blocks"]:
        return []
    lines = ["", f"Trained on rows of {found['trained_length']:,} tokens. By position in longer texts:", ""]
    columns = ("tokens", "perplexity", "teacher", "x teacher", "KL, nats a token")
    return lines + markdown_table(columns, position_rows(found["blocks"], ".4g"))


def _count(tokens: int | None) -> str:
    """Runs of earlier versions did not record how many there were."""
    return "" if tokens is None else f"{tokens:,}"


def recipe_text(recipe: Recipe) -> str:
    """The recipe, without its defaults."""
    text = yaml.safe_dump(portable(recipe.model_dump(mode="json", exclude_defaults=True)), sort_keys=False)
    return f"\n## Recipe\n\n```yaml\n{text}```\n"


def evaluations(recipe: Recipe, report: dict[str, Any]) -> list[EvalResult]:
    """`model-index`, which the Hub shows beside the card: the last evaluation, where it read one text; of images the
    accuracy alone, where they have a name on the Hub."""
    data = recipe.data_for(recipe.stages[-1])
    where = data_named(data.eval)
    if not report["stages"] or not where:
        return []
    row = report["stages"][-1]
    if holds_images(data.eval):
        name = f"accuracy, {row['eval_tokens']} images" if row["eval_tokens"] else "accuracy"
        of: dict[str, Any] = {"task_type": "image-classification", "metric_type": "accuracy", "metric_name": name}
        accuracy = row.get("accuracy")
        return [] if accuracy is None else [EvalResult(**of, metric_value=accuracy, **where)]
    over = (
        f"{row['eval_tokens']:,} tokens in rows of {data.pack.seq_len:,}" if row["eval_tokens"] else "held-out tokens"
    )
    metrics = {
        "perplexity": ("perplexity", row["ppl"]),
        "perplexity_ratio": ("perplexity over the teacher's", row.get("ppl_ratio")),
        "kl_divergence": ("KL from the teacher, nats a token", row.get("kl")),
        "accuracy": ("top-1 accuracy of the next token", row.get("accuracy")),
    }
    return [
        EvalResult(
            task_type="text-generation", metric_type=kind, metric_name=f"{name}, {over}", metric_value=value, **where
        )
        for kind, (name, value) in metrics.items()
        if value is not None
    ]


def data_named(source: Any) -> dict[str, Any]:
    """The dataset of an evaluation as `model-index` has it; of files that are not on the Hub their kind and their
    names, as transformers' own cards have it. Empty for folders of images, and for a mixture of texts."""
    if isinstance(source, DatasetSource):
        where = {"dataset_type": source.path, "dataset_name": source.path}
        return {**where, "dataset_config": source.name, "dataset_split": source.split}
    if isinstance(source, FileSource):
        names = [Path(name).name for name in source.files]
        kinds = {"txt": "text", "parquet": "parquet"}
        return {"dataset_type": kinds.get(names[0].rpartition(".")[2], "json"), "dataset_name": ", ".join(names)}
    if isinstance(source, DemoSource):
        return {"dataset_type": "text", "dataset_name": f"Python's standard library, part {source.demo} of linearize"}
    return {}


def with_tasks(text: str, result: dict[str, Any], name: str) -> str:
    """A card of the model `name` with what `linearize eval --tasks` measured: a table, and entries of `model-index` for
    tasks whose data have a name on the Hub."""
    card = ModelCard(text)
    data = card.data
    assert isinstance(data, ModelCardData)
    headings, rows = task_rows(result)
    lines = ["## Tasks", "", *markdown_table(headings, rows), ""]
    of = f" Teacher: `{portable(result['teacher'])}`." if result["teacher"] else ""
    if result.get("files"):
        of += f" From files, not from the Hub: {', '.join(result['files'])}."
    about = (
        f"`linearize eval --tasks` with lm-evaluation-harness {result['harness']}.{of} "
        "Few-shot: how many solved examples stand before each question."
    )
    before, mark, after = card.text.partition("\n## Recipe\n")
    card.text = redact("\n".join([before.rstrip("\n"), "", *lines, about, ""]) + mark + after)
    found = [entry for row in result["tasks"] if row["dataset"] for entry in task_results(row, result["harness"])]
    if found:
        data.model_name = data.model_name or name
        data.eval_results = [*(data.eval_results or []), *found]
    return str(card)


def task_results(row: dict[str, Any], harness: str) -> list[EvalResult]:
    """The entries of `model-index` for one task."""
    where = {"dataset_type": row["dataset"], "dataset_config": row["config"], "dataset_split": row["split"]}
    return [
        EvalResult(
            task_type="text-generation",
            dataset_name=row["task"],
            metric_type=one["metric"],
            metric_name=f"{one['metric']}, {row['few_shot']} examples, {one['filter']}".removesuffix(", none"),
            metric_value=one["student"],
            source_name=f"lm-evaluation-harness {harness}",
            source_url="https://github.com/EleutherAI/lm-evaluation-harness",
            **where,
        )
        for one in row["metrics"]
        if one.get("student") is not None
    ]


def datasets(recipe: Recipe | None) -> list[str]:
    """Hub datasets that the stages trained on."""
    used = [recipe.data_for(stage).train for stage in recipe.stages] if recipe else []
    return list(dict.fromkeys(data.path for data in used if isinstance(data, DatasetSource)))
