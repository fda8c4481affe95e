"""Tables for people, on stderr."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from .output import percent, ranges, size

if TYPE_CHECKING:
    from ..plan.plan import Plan
    from ..probe.inspection import Inspection
    from ..verify.checks import Check


def console() -> Console:
    """The console for human text, in which brackets are brackets: paths and messages may have some."""
    return Console(stderr=True, highlight=False, markup=False)


def short(count: float) -> str:
    """A count for people, in three digits: 20.5M."""
    for unit in ("", "k", "M", "B"):
        if count < 999.5:
            return f"{count:.3g}{unit}"
        count /= 1000
    return f"{count:.3g}T"


def plan_table(plan: Plan) -> None:
    """What becomes what, and what it costs."""
    out = console()
    title = f"{plan.source} ({plan.architecture}, {plan.dtype}), params and state of one layer"
    table = Table(title=title, box=SIMPLE_HEAD, padding=(0, 1, 0, 0), show_edge=False)
    for column in ("layers", "module", "from", "to", "new params", "state"):
        right, long = column in ("new params", "state"), column in ("module", "from")
        table.add_column(column, justify="right" if right else "left", overflow="fold", no_wrap=not long)
    rows: list[tuple[int, tuple[str, ...]]] = []
    for step in plan.steps:
        site = step.site
        heads = f"{site.kind}\n{site.heads}/{site.kv_heads}x{site.key_dim}"
        cost = (f"{step.new_parameters:,}", size(step.state_bytes) if site.causal else "none")
        rows.append((site.layer, (site.path, heads, step.mechanism, *cost)))
    for site in plan.kept:
        rows.append((site.layer, (site.path, site.kind, "softmax\n(kept)", "", "KV cache" if site.causal else "none")))
    for cells in alike(rows):
        table.add_row(*cells)
    out.print(table)
    for tokens, label in () if not plan.cache_bytes(1)["source"] else ((4096, "4k"), (131072, "128k")):
        cache = plan.cache_bytes(tokens)
        out.print(f"decode memory at {label} tokens: {size(cache['source'])} before, {size(cache['converted'])} after")
    rewritten = "source weights stay as they are"
    if plan.cast:
        rewritten = f"source weights are cast to {plan.dtype} shard by shard"
    elif plan.pickled:
        rewritten = "source weights are rewritten as safetensors, shard by shard"
    out.print(
        f"{plan.new_parameters:,} new parameters in {len(plan.steps)} layers; {rewritten}; "
        f"disk needed: {size(plan.needed_bytes)} beyond {size(plan.source_bytes)} of linked or copied shards"
    )
    if plan.kept:
        out.print(f"softmax stays in layers {ranges([s.layer for s in plan.kept])}")
    for other in plan.others:
        out.print(f"stays as it is: {other}")
    for note in plan.notes:
        out.print(Text("dropped", "yellow"), note)


def alike(rows: list[tuple[int, tuple[str, ...]]]) -> list[tuple[str, ...]]:
    """Rows of (layer, (path, other cells)): those that differ in numbers of the path become one, its layers first."""
    groups: dict[tuple[str, ...], list[int]] = {}
    for layer, (path, *cells) in sorted(rows):
        groups.setdefault((any_layer(path), *cells), []).append(layer)
    return [(ranges(layers), *cells) for cells, layers in groups.items()]


def any_layer(text: str) -> str:
    """`model.layers.3.self_attn` -> `model.layers.*.self_attn`, also within a sentence."""
    return re.sub(r"(?<=\.)\d+(?=\.|$)", "*", text)


def inspection_tables(inspection: Inspection) -> None:
    """Attention modules with their shapes, and which mechanisms fit."""
    from ..plan.plan import grouped

    out, found = console(), inspection.found
    title = f"{inspection.source} ({inspection.architecture}, {inspection.model_type})"
    table = Table(title=title, box=SIMPLE_HEAD, padding=(0, 1, 0, 0), show_edge=False)
    for column in ("layers", "module", "class", "H", "Hkv", "D", "Dv", "scale"):
        right, long = column in ("H", "Hkv", "D", "Dv", "scale"), column in ("module", "class")
        table.add_column(column, justify="right" if right else "left", overflow="fold", no_wrap=not long)
    rows: list[tuple[int, tuple[str, ...]]] = []
    for site in found.sites:
        heads = (site.heads, site.kv_heads, site.key_dim, site.value_dim)
        rows.append((site.layer, (site.path, site.kind, *map(str, heads), f"{site.scale:.4g}")))
    for cells in alike(rows):
        table.add_row(*cells)
    out.print(table)
    for extra in sorted({extra for site in found.sites for extra in site.extras}):
        layers = ranges([site.layer for site in found.sites if extra in site.extras])
        out.print(f"also passed to softmax in layers {layers}: {extra}")
    for other in grouped(found.others):
        out.print(f"stays as it is: {other}")
    table = Table(title="mechanisms")
    for column in ("name", "what it is", "fits layers", "why not the others"):
        table.add_column(column)
    for fit in inspection.fits:
        reasons = dict.fromkeys(any_layer(reason) for _, reason in fit.obstacles)
        table.add_row(fit.mechanism, fit.title, ranges(list(fit.layers)) or "none", "\n".join(reasons))
    out.print(table)


def recipe_table(plans: list[dict[str, Any]]) -> None:
    """What each stage will do, within 80 columns; `--json` has the exact numbers."""
    table = Table(title="stages", box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for column in ("stage", "trains", "parameters", "steps", "tokens", "lr", "teacher copy"):
        table.add_column(
            column,
            justify="left" if column in ("stage", "trains") else "right",
            no_wrap=column not in ("trains", "teacher copy"),
            min_width={"trains": 6, "teacher copy": 9}.get(column),
        )
    for plan in plans:
        named = plan["name"] != plan["kind"]
        table.add_row(
            f"{plan['name']}\n({plan['kind']})" if named else plan["name"],
            ", ".join(plan["train"]),
            short(plan["parameters"]),
            f"{plan['steps']:,}" if plan["steps"] else f"{plan['epochs']:g} epochs",
            short(plan["tokens"]) if plan["tokens"] else "",
            f"{plan['lr']:g}",
            size(plan["teacher_copy_bytes"]) if plan["teacher_copy_bytes"] else "none",
        )
    console().print(table)


def report_table(report: dict[str, Any]) -> None:
    """Held-out perplexity along the run, and how close each layer came."""
    out = console()
    if report["teacher_ppl"] is not None:
        table = Table(title="held-out perplexity")
        for column in ("", "training tokens", "perplexity", "x teacher", "top-1"):
            table.add_column(column, justify="left" if not column else "right")
        table.add_row(
            "teacher (softmax)", "", f"{report['teacher_ppl']:.3f}", "1.000", percent(report.get("teacher_accuracy"))
        )
        for row in report["stages"]:
            ppl, ratio = f"{row['ppl']:.3f}", f"{row['ppl_ratio']:.3f}"
            table.add_row(row["name"], f"{row['tokens']:,}", ppl, ratio, percent(row.get("accuracy")))
        out.print(table)
    if report["layers"]:
        table = Table(title="attention output against the teacher's, per layer")
        for column in ("layer", "relative squared error", "cosine"):
            table.add_column(column, justify="right")
        for row in report["layers"]:
            table.add_row(str(row["layer"]), f"{row['relative_mse']:.4f}", f"{row['cosine']:.4f}")
        out.print(table)


def comparison_table(result: dict[str, Any]) -> None:
    """What `linearize eval` measured."""
    out = console()
    table = Table(title=f"{result['tokens']:,} tokens of held-out text")
    for column in ("", "student", "teacher"):
        table.add_column(column, justify="left" if not column else "right")
    student, teacher = result["student_ppl"], result["teacher_ppl"]
    table.add_row("perplexity", f"{student:.3f} ({result['ppl_ratio']:.3f}x)", f"{teacher:.3f}")
    table.add_row("KL from the teacher, nats a token", f"{result['kl']:.4f}", "")
    table.add_row("same likeliest token", f"{100 * result['top1_agreement']:.1f} %", "")
    for task in ("recall", "needle"):
        for row in result[task]:
            entries = f", {row['entries']} entries" if task == "recall" else ""
            cells = [f"{100 * row[who]['accuracy']:.0f} %" for who in ("student", "teacher")]
            table.add_row(f"{task} at {row['length']} tokens{entries}", *cells)
    for row in result["state"]:
        table.add_row(f"state at {row['length']} tokens", size(row["student"]), size(row["teacher"]))
    out.print(table)


def checks_table(title: str, checks: list[Check]) -> None:
    """What `linearize verify` found."""
    table = Table(title=title)
    for column in ("check", "result", "difference", "limit", "detail"):
        table.add_column(column, justify="right" if column in ("difference", "limit") else "left", overflow="fold")
    colours = {"passed": "green", "failed": "red", "warning": "yellow", "skipped": "yellow"}
    for check in checks:
        numbers = ["" if value is None else f"{value:.1e}" for value in (check.difference, check.limit)]
        table.add_row(check.name, Text(check.status, colours[check.status]), *numbers, check.detail)
    console().print(table)


# ---------------------------------------------------------------- results for people, on stdout


def mechanisms_table(found: list[dict[str, Any]]) -> None:
    """One line a mechanism."""
    table = Table(box=SIMPLE_HEAD)
    for column in ("name", "what it is", "paper", "direction", "backends"):
        table.add_column(column)
    for one in found:
        table.add_row(one["name"], one["title"], one["paper"], direction(one), ", ".join(one["backends"]))
    Console(highlight=False).print(table)


def mechanism_table(one: dict[str, Any]) -> None:
    """Everything about one mechanism."""
    out, example = Console(highlight=False, soft_wrap=True, markup=False), one["example"]
    print(f"{one['name']}: {one['title']} ({one['paper']}), {direction(one)}; backends: {', '.join(one['backends'])}")
    print(f"\n{one['about']}\n")
    print(f"state, bytes per layer and sequence: {one['state_formula']}")
    print(
        f"{example['site']}: {example['new_parameters']:,} new parameters, state {size(example['state_bytes'])}, where "
        f"a KV cache of {example['tokens']:,} tokens in 16 bits takes {size(example['cache_bytes'])}"
    )
    table = Table(box=SIMPLE_HEAD)
    for column in ("option", "values", "default", "published"):
        table.add_column(column)
    for option in one["options"]:
        published = option["published"] if option["published"] != option["default"] else ""
        table.add_row(option["name"], values(option), str(option["default"]), str(published))
    out.print(table)
    if any(option["published"] != option["default"] for option in one["options"]):
        print("`--set faithful=true` starts from what is published.\n")
    print(one["options_about"])


def direction(one: dict[str, Any]) -> str:
    """Which models a mechanism is for."""
    return ", ".join(word for word in ("causal", "bidirectional") if one[word])


def values(option: dict[str, Any]) -> str:
    """What an option may be."""
    if option["type"] == "choice":
        return " | ".join(option["choices"])
    return f"{option['type']} {option['low']:g} to {option['high']:g}" if "low" in option else option["type"]
