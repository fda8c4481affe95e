"""Tables for people, all in one style: on stderr beside messages, on stdout where the table is the result."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from ..plan.heads import regrouped, written
from ..plan.keep import LONGEST, MEANING, UNSCORED, KeptWindow
from .output import counted, duration, layers_named, nats, percent, printable, ranges, short, size

if TYPE_CHECKING:
    from ..plan.keep import Choice, WindowChoice
    from ..plan.plan import Plan, Step
    from ..probe.inspection import Converted, Inspection
    from ..recipe.presets import Preset
    from ..verify.checks import Check


class Plain(Console):
    """A console that shows control characters of other people's strings instead of obeying them."""

    def __init__(self, **how: Any) -> None:
        super().__init__(**how)
        self._width = self._width or None  # some terminals and CI set COLUMNS=0: not known

    def render_str(self, text: str, **how: Any) -> Text:
        return super().render_str(printable(text), **how)


def console() -> Console:
    """The console for human text, in which brackets are brackets and `:100:` is no picture: messages may have some."""
    return Plain(stderr=True, highlight=False, markup=False, emoji=False)


def results() -> Console:
    """The console for tables that are a command's result."""
    return Plain(highlight=False, markup=False, emoji=False)


# Words of results, and how they are coloured.
T = TypeVar("T")
COLOURS = {"passed": "green", "ok": "green", "failed": "red", "missing": "red"}
COLOURS |= dict.fromkeys(("warning", "skipped", "optional", "note"), "yellow")
# A column gets at least as much room as its longest word takes, up to so many characters: words are not cut. Longer
# ones, such as paths, are cut where a line is full; where the table is too wide their column may shrink to LEAST.
LONGEST_WORD, LEAST = 20, 8

# What a check of `verify` found to be so, by its name, where it passed and has no detail of its own.
FOUND = {
    "files": "the files and the code that linearize.json lists",
    "config": "config.json has the plan of linearize.json",
    "finite logits": "no NaN and no infinity",
    "finite outputs": "no NaN and no infinity",
    "prefill and steps": "one pass equals a prefill and single tokens",
    "chunk size": "other chunks change nothing",
    "left padding": "a padded row equals the row alone",
    "left padding without position_ids": "the mask alone is enough",
    "right padding": "a padded row equals the row alone",
    "packed documents": "documents in one row equal each alone",
    "beams": "states follow their beams",
    "generate": "generate() equals one pass over its text",
    "constant state": "states of linear layers do not grow",
    "trust": "without trust_remote_code it does not load",
    "rows alone": "a row of a batch equals the row alone",
    "padding": "padding changes nothing of a text",
    "another size": "rows of another size equal each alone",
    "softmax teacher": "under teacher() it is the source",
}


def table(columns: dict[str, str], rows: Iterable[Sequence[str]], title: str | None = None) -> Table:
    """A table of `rows`. `columns`: heading -> `text` (wrapped between words), `short` or `number`; the last two are
    wrapped only where the table is wider than the terminal otherwise."""
    made = Table(title=title, box=SIMPLE_HEAD, padding=(0, 1, 0, 0), show_edge=False, title_justify="left")
    cells = [list(row) for row in rows]
    kinds, texts = [*columns.values()], [[heading, *(r[n] for r in cells)] for n, heading in enumerate(columns)]
    words = [[len(word) for text in own for word in text.split()] or [0] for own in texts]
    least = [min(LONGEST_WORD, max(own)) for own in words]
    whole = [max(len(line) for text in own for line in text.split("\n")) for own in texts]
    room = console().width - 2 * len(columns)
    fixed = None
    if sum(n if kind == "text" else full for n, full, kind in zip(least, whole, kinds, strict=True)) > room:
        fixed = divided(room, words, whole)
    for place, (heading, kind) in enumerate(columns.items()):
        made.add_column(
            heading,
            justify="right" if kind == "number" else "left",
            no_wrap=kind != "text" and not fixed,
            overflow="fold",
            min_width=least[place] if kind == "text" and not fixed else None,
            width=fixed[place] if fixed else None,
        )
    for row in cells:
        made.add_row(*(Text(printable(cell), COLOURS.get(cell, "")) for cell in row))
    return made


def divided(room: int, words: list[list[int]], whole: list[int]) -> list[int] | None:
    """Widths of columns that fill `room`, each wide enough for its words, by the lengths of these and of the `whole`
    lines; None where there is less room than for LEAST. Where words do not fit, those of the widest columns are cut."""
    widths = [max([n for n in own if n <= LONGEST_WORD] + [LEAST] * (max(own) > LONGEST_WORD)) for own in words]
    while sum(widths) > room:
        if max(widths) <= LEAST:
            return None
        widths[widths.index(max(widths))] -= 1
    for _ in range(min(room, sum(whole)) - sum(widths)):
        lacking = [full - width for full, width in zip(whole, widths, strict=True)]
        widths[lacking.index(max(lacking))] += 1
    return widths


def plan_table(plan: Plan) -> None:
    """What becomes what, and what it costs."""
    out = console()
    title = f"{plan.source} ({plan.architecture}, {plan.dtype}), params and state of one layer"
    columns = {"layers": "short", "module": "text", "from": "text", "to": "short"}
    columns |= {"new params": "number", "state": "number"}
    rows: list[tuple[int, tuple[str, ...]]] = []
    last = plan.reconversions[-1] if plan.reconversions else None
    for step in plan.steps:
        site = step.site
        stays = "\n(as it is)" if last and site.path not in last.added else ""
        heads = f"{site.kind}\n{site.heads}/{site.kv_heads}x{site.key_dim}"
        exact, kv = "", ""
        if site.softmax_groups:
            exact, kv = f"\nsoftmax in {len(site.softmax_groups)}/{site.kv_heads}", "\n+ KV cache"
        cost = f"{step.new_parameters:,}", (size(step.state_bytes) if site.causal else "none") + kv
        rows.append((site.layer, (site.path, heads, attention(plan, step) + exact + stays, *cost)))
    for site in plan.kept:
        how = "given back" if last and site.path in last.restored else "kept"
        rows.append(
            (site.layer, (site.path, site.kind, f"softmax\n({how})", "", "KV cache" if site.causal else "none"))
        )
    out.print(table(columns, alike(rows), title))
    options: dict[str, list[int]] = {}
    for step in plan.linear:
        options.setdefault(chosen_options(step), []).append(step.site.layer)
    for chosen, layers in options.items():
        of = f" of layers {ranges(layers)}" if len(options) > 1 else ""
        out.print(f"options{of}: {chosen}")
    for tokens, label in () if not plan.cache_bytes(1)["source"] else ((4096, "4k"), (131072, "128k")):
        cache = plan.cache_bytes(tokens)
        out.print(f"decode memory at {label} tokens: {size(cache['source'])} before, {size(cache['converted'])} after")
    if last:
        out.print(reconversion_text(plan))
    rewritten = "source weights are copied as they are" if plan.copy else "source weights stay as they are"
    if plan.cast:
        rewritten = f"{plan.rounding or f'source weights are cast to {plan.dtype}'}, shard by shard"
    elif plan.pickled:
        rewritten = "source weights are rewritten as safetensors, shard by shard"
    linked = not (plan.cast or plan.pickled or plan.copy)
    rest = f" beyond {size(plan.source_bytes)} of linked or copied shards" if linked else ""
    out.print(
        f"{plan.new_parameters:,} new parameters in {counted(len(plan.linear), 'layer')}; {rewritten}; "
        f"disk needed: {size(plan.needed_bytes)}{rest}"
    )
    if linked:
        out.print(
            "the result's shards of source weights are hard links to the source's files where the disk allows: what is "
            "written into one of them, in place, is in both (--copy makes copies)"
        )
    for choice, flag in ((plan.choice, "--keep-softmax"), (plan.heads_choice, "--keep-heads")):
        if choice is not None and choice.scores:
            choice_table(choice, flag)
    if plan.window_choice is not None:
        windows_table(plan.window_choice)
    elif plan.local and not last:
        out.print(window_text(plan.choice))
    if plan.softmax:
        out.print(plan.softmax)
    if plan.softmax_groups:
        out.print(f"softmax stays in key heads (layer:head) {written(plan.softmax_groups)}")
    for other in plan.others:
        out.print(f"stays as it is: {other}")
    for note in plan.notes:
        out.print(Text("dropped", "yellow"), note)


def attention(plan: Plan, step: Step) -> str:
    """What a layer has after the conversion, in a column of a table."""
    return f"softmax\n(last {step.options['window']:,})" if step in plan.local else step.mechanism


def reconversion_text(plan: Plan) -> str:
    """What the last conversion changes in a model that was converted before."""
    last = plan.reconversions[-1]
    new = [step for step in plan.steps if step.site.path in last.added]
    back = [site.layer for site in plan.kept if site.path in last.restored]
    become = "becomes" if len(new) == 1 else "become"
    changes = [f"{layers_named(s.site.layer for s in new)} {become} {new[0].mechanism}"] if new else []
    gets = "gets softmax back, and its mixer is" if len(back) == 1 else "get softmax back, and their mixers are"
    changes += [f"{layers_named(back)} {gets} dropped"] if back else []
    return f"{last.folder} is converted already: {'; '.join(changes)}; all other weights stay as they are"


def choice_table(choice: Choice, flag: str) -> None:
    """The score of every layer, or head, what was chosen, and how to have it again without scoring; `flag` asked."""
    out = console()
    what, names = ("head", [*choice.kept]) if flag == "--keep-heads" else ("layer", [*map(str, choice.kept)])
    scores = [(name, f"{score:.3f}", "softmax (kept)" * (name in names)) for name, score in choice.scores.items()]
    out.print(table({what: "number", "score": "number", "attention": "short"}, scores))
    out.print(f"{choice.asked}, scored by {choice.method}: {MEANING[choice.method]}")
    if choice.method != "gates":
        mean = ", the mean of text and repetition" if choice.recalls else ""
        out.print(f"the loss is KL from the source, as a share of that with no {what} kept{mean}")
    texts = counted(choice.recalls, "text that asks", "texts that ask")
    recall = f" and {texts} for a repetition" if choice.recalls else ""
    if choice.lacking:
        recall = f" alone ({choice.lacking})"
    rows = f" in rows of {choice.seq_len:,}" if choice.seq_len else ""  # earlier versions did not say
    out.print(f"scored on {choice.tokens:,} tokens{rows} of {choice.text}{recall}, mixers trained for a moment")
    for kind, linear in choice.kl["linear"].items():
        these = nats(choice.kl["kept"][kind])
        out.print(f"KL from the source in nats a token, {kind}: {nats(linear)} with no {what} kept, {these} with these")
    again = f"'{regrouped(choice.kept)}'" if what == "head" else ",".join(names)
    out.print(f"{flag} {again} repeats this without scoring")


def window_text(choice: Choice | None) -> str:
    """What the window of kept softmax costs, or how to measure it."""
    if choice is None or choice.method == UNSCORED:
        return "what the window of kept softmax costs was not measured: --score-text FILE measures it on texts of yours"
    if not choice.window:
        longer = f"documents longer than it, which the model knows, of {LONGEST:,} tokens at most"
        return f"what the window of kept softmax costs was not measured: it takes {longer}, and {choice.text} gave none"
    return "\n".join(cost_lines(choice.window, choice.text))


def cost_lines(costs: dict[str, dict[str, float]], text: str) -> list[str]:
    """What the source loses by a window in some layers, a line for each kind of text."""
    lines = []
    for kind, cost in costs.items():
        where = text if kind == "text" else "texts that ask for a repetition"
        lines.append(
            f"cost of the window in the kept layers of the source, at the end of {where} of {cost['length']:,} tokens: "
            f"perplexity {cost['source_ppl']:.3f} becomes {cost['ppl']:.3f}, KL {nats(cost['kl'])} nats a token"
        )
    return lines


def windows_table(windows: WindowChoice) -> None:
    """What a window costs in each kept layer, which have it, and how to have that again without measuring."""
    out, asked = console(), KeptWindow.parse(windows.asked)
    if not windows.costs:
        out.print(f"--kept-window {windows.asked}: all kept layers see all tokens, since {windows.lacking}")
        return
    kinds = [*next(iter(windows.costs.values()))]
    rows = []
    for layer, cost in windows.costs.items():
        reach = f"the last {asked.tokens:,}" if int(layer) in windows.near else "all tokens"
        rows.append((layer, *(nats(cost[kind]["kl"]) for kind in kinds), reach))
    out.print(table({"layer": "number"} | {f"KL, {kind}": "number" for kind in kinds} | {"sees": "short"}, rows))
    limit = f"the last {asked.tokens:,} and the first ones alone where KL is at most {windows.limit:g} nats a token"
    out.print(f"{windows.asked}: the window in one kept layer of the source at a time; {limit}, also in all of them")
    length = next(iter(windows.costs.values()))["text"]["length"]
    lists = ", and of lists to repeat" if "recall" in kinds else ""
    out.print(f"measured at the end of documents of {length:,} tokens of {windows.text}{lists}")
    for line in cost_lines(windows.together, windows.text):
        out.print(line)
    again = f"{asked.tokens}@{','.join(map(str, windows.near))}" if windows.near else ""
    out.print(f"--kept-window {again} repeats this without measuring" if again else "no kept layer gets the window")


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
    columns = {"layers": "short", "module": "text", "class": "text"}
    columns |= dict.fromkeys(("H", "Hkv", "D", "Dv", "scale"), "number")
    rows: list[tuple[int, tuple[str, ...]]] = []
    for site in found.sites:
        heads = (site.heads, site.kv_heads, site.key_dim, site.value_dim)
        rows.append((site.layer, (site.path, site.kind, *map(str, heads), f"{site.scale:.4g}")))
    out.print(table(columns, alike(rows), title))
    out.print("H: query heads, Hkv: key heads, D and Dv: width of a key and of a value; scale multiplies q.k")
    for extra in sorted({extra for site in found.sites for extra in site.extras}):
        layers = layers_named(site.layer for site in found.sites if extra in site.extras)
        out.print(f"also passed to softmax in {layers}: {extra}")
    for other in grouped(found.others):
        out.print(f"stays as it is: {other}")
    fits = []
    for fit in inspection.fits:
        reasons = dict.fromkeys(any_layer(reason) for _, reason in fit.obstacles)
        fits.append((fit.mechanism, fit.title, ranges(list(fit.layers)) or "none", "\n".join(reasons)))
    columns = {"mechanism": "short", "what it is": "text", "fits layers": "text", "why not the others": "text"}
    out.print(table(columns, fits))


def converted_table(inspection: Converted) -> None:
    """The layers of a converted model, and the options in which they differ from the mechanism's defaults."""
    out, plan = console(), inspection.plan
    rows: list[tuple[int, tuple[str, ...]]] = []
    for step in plan.steps:
        rows.append((step.site.layer, (step.site.path, attention(plan, step), chosen_options(step))))
    rows += [(site.layer, (site.path, "softmax", "")) for site in plan.kept]
    columns = {"layers": "short", "module": "text", "attention": "short", "options": "text"}
    out.print(table(columns, alike(rows), f"{inspection.source} (converted {plan.architecture})"))


def chosen_options(step: Step) -> str:
    """The options of a layer that are not the mechanism's defaults: `slots=32 window=64`."""
    from ..plan.mechanisms import resolve_options, to_settings

    base = {"base": step.options["base"]} if "base" in step.options else {}
    defaults = resolve_options(step.mechanism, base) | {"base": None}
    chosen = {key: value for key, value in step.options.items() if defaults.get(key) != value}
    return " ".join(to_settings(chosen)) or "defaults"


def recipe_table(plans: list[dict[str, Any]]) -> None:
    """What each stage will do, within 80 columns; `--json` has the exact numbers."""
    columns = {"stage": "short", "trains": "text"}
    unit = unit_of_stages(plans)
    columns |= dict.fromkeys(("parameters", "steps", unit, "lr"), "number") | {"teacher copy": "text"}
    rows = []
    for plan in plans:
        named = plan["name"] != plan["kind"]
        rows.append(
            (
                f"{plan['name']}\n({plan['kind']})" if named else plan["name"],
                ", ".join(plan["train"]),
                short(plan["parameters"]),
                f"{plan['steps']:,}" if plan["steps"] else f"{plan['epochs']:g} epochs",
                short(plan["tokens"]) if plan["tokens"] else "",
                f"{plan['lr']:g}" + (f"\n{plan['new_lr']:g} new" if plan["new_lr"] else ""),
                size(plan["teacher_copy_bytes"]) if plan["teacher_copy_bytes"] else "none",
            )
        )
    console().print(table(columns, rows, "stages"))


def unit_of_stages(plans: list[dict[str, Any]]) -> str:
    """What the stages of a dry run count: an image is a row of one token."""
    return "images" if all(plan["data"]["seq_len"] == 1 for plan in plans) else "tokens"


def data_lines(plans: list[dict[str, Any]]) -> None:
    """What the stages read and how much they ask for, then on what they are evaluated: once where it is the same."""
    trained: dict[str, dict[str, list[str]]] = {}
    evaluated: dict[str, list[str]] = {}
    for plan in plans:
        data = plan["data"]
        images = data["seq_len"] == 1
        train = data["train"] + ("" if images else f" in blocks of {data['seq_len']:,}")
        if not images and plan["tokens"] and (plan["steps"] or 0) > 1:
            train += f", {plan['tokens'] // plan['steps']:,} tokens a step"
        asked = f"{plan['epochs']:g} epochs" if data["tokens"] is None else asked_for(data["tokens"], images)
        asked += "" if data["tokens"] is None or images else " in whole steps"
        if "passes" in data:
            asked += f", {data['passes']} passes or more"
        held = (
            "nothing" if data["eval"] is None else f"{data['eval']}, at most {asked_for(data['eval_tokens'], images)}"
        )
        trained.setdefault(train, {}).setdefault(asked, []).append(plan["name"])
        evaluated.setdefault(held, []).append(plan["name"])

    def named(names: list[str], words: str) -> str:
        return words if len(names) == len(plans) else f"{', '.join(names)} {words}"

    out = console()
    for train, amounts in trained.items():
        out.print(f"trains on {train}: {'; '.join(named(names, asked) for asked, names in amounts.items())}")
    for held, names in evaluated.items():
        out.print(named(names, f"evaluated on {held}"))
    if any(plan["data"].get("foreign_eval") for plan in plans):
        out.print("note: data.eval is a dataset still. For text of yours add 'data.eval={files: [held-out.txt]}'")


def asked_for(count: int, images: bool) -> str:
    """So many tokens, or images."""
    return f"{short(count)} {'images' if images else 'tokens'}"


# What the parts of an estimate's memory are called where that is not their key.
PART_NAMES = {"masters": "float32 weights", "total": "sum"}


def estimate_table(found: dict[str, Any]) -> None:
    """What a run costs: memory of each stage by its parts, then time, and what holds for all."""
    out, device = console(), found["device"]
    parts = [part for part in found["stages"][0]["memory"] if part not in ("total", "device")]
    columns = {"part": "short"} | dict.fromkeys((row["name"] for row in found["stages"]), "number")
    rows = []
    for part in (*parts, "total"):
        held = [row["memory"][part] for row in found["stages"]]
        if part == "weights":  # where every weight trains in float32, what is left are buffers
            masters = [row["memory"]["masters"] for row in found["stages"]]
            held = [count * (1000 * count > master) for count, master in zip(held, masters, strict=True)]
        rows.append((PART_NAMES.get(part, part), *(size(count) if count else "0" for count in held)))
    count = f"each of {device['count']} x " if device["count"] > 1 else ""
    out.print(table(columns, rows, f"peak memory of {count}{device['name']} ({size(device['memory'])})"))
    unit = unit_of_stages(found["stages"])
    beside = "needs: the sum above, and what CUDA and its allocator take besides"
    columns = {"stage": "short", "needs": "number", "fits": "short", f"{unit}/s": "number", "time": "number"}
    measured = any(row.get("measured") for row in found["stages"])
    columns |= {"measured": "text"} if measured else {}
    rows = []
    for row in found["stages"]:
        rate, hours = row["tokens_per_s"], row["hours"]
        cells: tuple[str, ...] = (row["name"], size(row["memory"]["device"]), "yes" if row["fits"] else "NO")
        cells += ("" if rate is None else f"{rate:,.0f}", "" if hours is None else duration(3600 * hours))
        if measured:
            one = row["measured"]
            cells += (f"{one['tokens_per_s']:,.0f} {unit}/s, {size(one['peak'])}",)
        rows.append(cells)
    out.print(table(columns, rows, beside if device["name"] != "cpu" else None))
    if device["name"] == "cpu":
        out.print(
            "These are tensors. On a CPU a run shows the peak of its whole process, with Python, its packages and "
            "memory that was freed and is kept. The cores' speed was measured just now, beside all else that runs"
        )
    for row in found["stages"]:
        if row["uncounted"]:
            out.print(f"activations of {row['name']} are not counted: {row['uncounted']}")
        if row["host_bytes"]:
            out.print(f"{row['name']} keeps {size(row['host_bytes'])} of activations in the host's memory")
    disk = found["disk"]
    told = [
        f"disk {size(disk['total'])} when it is fullest ("
        + ", ".join(f"{k} {size(v)}" for k, v in disk.items() if v and k != "total")
        + ")"
    ]
    told += [] if found["hours"] is None else [spent(found)]
    told += [] if found["kwh"] is None else [f"{found['kwh']:.2g} kWh at full power"]
    if found["price"] is not None:
        hourly = f" at {found['price'] / (found['hours'] * device['count']):.4g} an hour" if found["hours"] else ""
        told.append(f"price {found['price']:.2f}{hourly}{' and device' * (device['count'] > 1)}")
    out.print("; ".join(told))


def spent(found: dict[str, Any]) -> str:
    """The time of a whole run by what takes it."""
    parts = [f"{name} {duration(3600 * hours)}" for name, hours in found["hours_of"].items() if hours]
    return f"{duration(3600 * found['hours'])} in all ({', '.join(parts)})"


def report_table(report: dict[str, Any]) -> None:
    """Held-out perplexity along the run, of images accuracy before it, of maps what `evaluation_figures` has, and how
    close each layer came."""
    out = console()
    unit = report.get("unit") or "tokens"
    rows: list[dict[str, str]] = []
    if report["teacher_ppl"] is not None:
        who = f"teacher ({report['teacher']['model']})" if report.get("teacher") else "teacher (softmax)"
        teacher = {"name": who, "ppl": report["teacher_ppl"], "accuracy": report.get("teacher_accuracy")}
        rows.append(evaluation_cells(teacher | {"ppl_ratio": 1.0}, unit))
    rows += [evaluation_cells(row, unit) for row in report["stages"]]
    if rows:
        columns = {name: "number" if name else "text" for name in rows[0]}
        out.print(table(columns, [tuple(row.values()) for row in rows], f"held-out {[*rows[0]][2]}"))
    if unit == "tokens" and report["stages"] and (note := note_below(report["stages"][-1].get("ppl_ratio"))):
        out.print(note)
    positions_table(report.get("positions"))
    if report["layers"]:
        columns = dict.fromkeys(("layer", "relative squared error", "cosine"), "number")
        layers = [(str(row["layer"]), f"{row['relative_mse']:.4f}", f"{row['cosine']:.4f}") for row in report["layers"]]
        out.print(table(columns, layers, "attention output against the teacher's, per layer"))


def accuracy_first(unit: str, accuracy: T, figures: list[T]) -> list[T]:
    """Columns or cells of an evaluation in order: accuracy stands before the `figures` of images, and behind those of
    tokens."""
    return [accuracy, *figures] if unit == "images" else [*figures, accuracy]


def evaluation_cells(row: dict[str, Any], unit: str) -> dict[str, str]:
    """A row of a report in cells, by their headings."""
    named = row_name(row["name"], row.get("calibrated"))
    trained = f"{row['tokens']:,}" if "tokens" in row else ""
    return {"": named, f"training {unit}": trained} | evaluation_figures(row, unit, ".3f")


def row_name(stage: str, calibrated: bool | None) -> str:
    """What a table calls an evaluation: that of the converted model is often made after the run has calibrated it."""
    return f"{stage}, calibrated" if calibrated else stage


def evaluation_figures(row: dict[str, Any], unit: str, form: str) -> dict[str, str]:
    """The figures of an evaluation by their headings, in order; `form` is that of perplexities. Of maps of classes the
    share of patches or pixels that have the teacher's class, and of numbers the error relative to the teacher's."""
    if row.get("agreement") is not None:
        return {"same class": percent(row["agreement"]), "KL, nats a patch or pixel": nats(row.get("kl"))}
    if row.get("error") is not None:
        return {"relative squared error": nats(row["error"])}
    figures = [
        ("perplexity", format(row["ppl"], form)),
        ("x teacher", "" if row.get("ppl_ratio") is None else format(row["ppl_ratio"], form)),
        (f"KL, nats {'an image' if unit == 'images' else 'a token'}", nats(row.get("kl"))),
    ]
    accuracy = ("accuracy" if unit == "images" else "tokens right", percent(row.get("accuracy")))
    return dict(accuracy_first(unit, accuracy, figures))


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


def positions_table(found: dict[str, Any] | None) -> None:
    """Perplexity and KL by position in long texts, where there were any. A student whose training is not `recorded` has
    no trained length: the first stretch is then a block of the text."""
    if not found or not found["blocks"]:
        return
    columns = {"tokens": "short"} | dict.fromkeys(("student", "teacher", "x teacher", "KL, nats a token"), "number")
    rows = [
        (
            f"{row['from']:,}-{row['to']:,}",
            *(f"{row[key]:.3f}" for key in ("student_ppl", "teacher_ppl", "ppl_ratio")),
            nats(row.get("kl")),
        )
        for row in found["blocks"]
    ]
    origin = "documents joined" if found["text"] == "joined" else "long documents"
    title = f"perplexity by position in {counted(found['rows'], 'row')} of {origin}"
    length = found["trained_length"]
    unknown = f"; no trained length is recorded: the first stretch is a row of the text, {length:,} tokens"
    recorded = found.get("recorded", True)  # `finetune` says nothing of it: it measures what it trained
    console().print(
        table(columns, rows, f"{title}, trained in rows of {length:,} tokens" if recorded else title + unknown)
    )


# What models write by themselves, as `linearize eval --generate` measures it.
WRITTEN_FREELY = {
    "recall": "recall written freely",
    "python": "Python written that parses",
    "repeated": "written tokens that repeat (runs of 4)",
}


def note_below(ppl_ratio: float | None) -> str:
    """A note where a student has less perplexity than its teacher; empty where it has not."""
    if ppl_ratio is None or ppl_ratio > 0.995:  # nearer to 1 is noise
        return ""
    return (
        "note: a perplexity below the teacher's makes no better model. A weak teacher may gain from a window by "
        "itself, and training on text more like this one lowers it, too. How close the student is, the KL says"
    )


def remarks(result: dict[str, Any]) -> list[str]:
    """Sentences on figures of `linearize eval` that are easily misread."""
    nothing = empty_tasks_note(result)
    return [note for note in (note_below(result["ppl_ratio"]), f"note: {nothing}" * bool(nothing)) if note]


def empty_tasks(result: dict[str, Any] | None) -> list[str]:
    """Tasks of a result of `linearize eval` of which the teacher finds 0 % at every length, as tables round it."""
    asked = {task: (result or {}).get(task) or [] for task in ("recall", "needle")}
    return [
        task for task, rows in asked.items() if rows and not any(round(100 * r["teacher"]["accuracy"]) for r in rows)
    ]


def empty_tasks_note(result: dict[str, Any] | None) -> str:
    """That such tasks compare nothing; empty where there are none."""
    tasks = empty_tasks(result)
    compare = "compares" if len(tasks) == 1 else "compare"
    return f"{' and '.join(tasks)} {compare} nothing here: the teacher itself finds 0 %" if tasks else ""


def asked_rows(result: dict[str, Any]) -> list[tuple[str, str, str]]:
    """What student and teacher were asked, and what they wrote by themselves: name, student, teacher."""
    rows = []
    for task in ("recall", "needle"):
        for row in result.get(task) or ():
            entries = f", {row['entries']} entries" if task == "recall" else ""
            student, teacher = (percent(row[who]["accuracy"]) for who in ("student", "teacher"))
            rows.append((f"{task} at {row['length']:,} tokens{entries}", student, teacher))
    free: dict[str, Any] = result.get("generated") or {}
    for key, words in WRITTEN_FREELY.items() if free else ():
        if free["teacher"][key] is not None:
            lists = f"{counted(free['rows'], 'list')} of {free['length']:,} tokens"
            count = lists if key == "recall" else counted(free["texts"], "text")
            rows.append((f"{words}, {count}", percent(free["student"][key]), percent(free["teacher"][key])))
    return rows


def written_dtypes(dtypes: dict[str, str]) -> str:
    """In which dtype student and teacher were measured: `float32`, or each apart."""
    if len({*dtypes.values()}) == 1:
        return next(iter(dtypes.values()))
    return ", ".join(f"{who} in {dtype}" for who, dtype in dtypes.items())


def comparison_table(result: dict[str, Any]) -> None:
    """What `linearize eval` measured."""
    student, teacher = result["student_ppl"], result["teacher_ppl"]
    rows: list[tuple[str, ...]] = [
        ("perplexity", f"{student:.3f} ({result['ppl_ratio']:.3f}x)", f"{teacher:.3f}"),
        ("KL from the teacher, nats a token", nats(result["kl"]), ""),
        ("same prediction (likeliest token)", percent(result["top1_agreement"]), ""),
        *asked_rows(result),
    ]
    both = "both in " * (len({*result["dtypes"].values()}) > 1)
    for row in result["state"]:
        cells = [size(row[who]) for who in ("student", "teacher")]
        rows.append((f"state at {row['length']:,} tokens, {both}{result['state_dtype']}", *cells))
    columns = {"": "text", "student": "number", "teacher": "number"}
    title = f"{result['read']:,} tokens of {result['text']}, in rows of {result['seq_len']:,}; "
    title += f"{result['tokens']:,} of them are predicted; {written_dtypes(result['dtypes'])}"
    console().print(table(columns, rows, title))
    console().print(
        "recall: second words of a list of pairs, asked for by the first; needle: one such pair in other text"
    )
    positions_table(result["positions"])


def answers_table(result: dict[str, Any]) -> None:
    """What `linearize eval` measured of images or masked text."""
    images, parts = result["kind"] == "images", result["predicts"] == "parts"
    one, many = ("image", "images") if images else ("hidden token", "hidden tokens")
    rows: list[tuple[str, ...]] = []
    if result["labelled"]:
        labels = "" if result["labelled"] == result["asked"] else f", {result['labelled']:,} with a label"
        rows = [
            (f"accuracy{labels}", percent(result["student_accuracy"]), percent(result["teacher_accuracy"])),
            ("perplexity of the labels", f"{result['student_ppl']:.3f}", f"{result['teacher_ppl']:.3f}"),
        ]
    if result["predicts"] == "numbers":
        rows = [("squared error relative to the teacher's own square", nats(result["relative_error"]), "")]
    else:
        one = "patch or pixel" if parts else one
        same = f"same class of a {one}" if parts else f"same {'class' if images else 'token'}"
        rows += [
            (same, percent(result["top1_agreement"]), ""),
            (f"KL from the teacher, nats per {one}", nats(result["kl"]), ""),
        ]
    columns = {"": "text", "student": "number", "teacher": "number"}
    console().print(table(columns, rows, f"{result['asked']:,} {many} of {result['data']}"))


def embeddings_table(result: dict[str, Any]) -> None:
    """What `linearize eval` measured of two sentence encoders."""
    rows: list[tuple[str, ...]] = []
    for what in ("sentences", "passages"):
        rows.append((f"Spearman of similarities, pairs of {what}", f"{result[f'spearman_{what}']:.4f}", ""))
        rows.append((f"cosine with the teacher's vector, {what}", f"{result[f'cosine_{what}']:.4f}", ""))
    for places in (1, 10):
        found = (percent(result[f"{who}_found_{places}"]) for who in ("student", "teacher"))
        rows.append((f"passage found by its first sentence, top {places}", *found))
    rows.append(("same passage found first", percent(result["same_answer"]), ""))
    columns = {"": "text", "student": "number", "teacher": "number"}
    title = f"{result['passages']:,} passages of {result['data']}, {result['longest']:,} tokens at most"
    console().print(table(columns, rows, title))


def tasks_table(result: dict[str, Any]) -> None:
    """What lm-evaluation-harness measured."""
    kinds = ("text", "short", "number", "number", "number", "number")
    headings, rows = task_rows(result)
    console().print(table(dict(zip(headings, kinds, strict=False)), rows, f"lm-evaluation-harness {result['harness']}"))
    for row in result["tasks"] if result["teacher"] else ():
        found = [one["teacher"] for one in row["metrics"] if one.get("higher_is_better")]
        if found and not any(found):
            console().print(f"note: {row['task']} compares nothing here: the teacher itself is right in no row")


def task_rows(result: dict[str, Any]) -> tuple[list[str], list[tuple[str, ...]]]:
    """Headings and rows, one a metric, of a result of `linearize eval --tasks`; of a group its means alone."""
    who = ["student", *(["teacher"] if result["teacher"] else [])]
    rows: list[tuple[str, ...]] = []
    for row in result["tasks"]:
        numbers = ["" if row[key] is None else f"{row[key]:,}" for key in ("few_shot", "rows")]
        for one in row["metrics"] if row["part_of"] is None else ():
            name = one["metric"] if one["filter"] == "none" else f"{one['metric']}, {one['filter']}"
            rows.append((row["task"], name, *numbers, *(with_error(one, which) for which in who)))
    return ["task", "metric", "few-shot", "rows", *who], rows


def with_error(metric: dict[str, Any], who: str) -> str:
    """A value of a task's metric, with its standard error where the harness has one."""
    value, error = metric.get(who), metric.get(f"{who}_error")
    if value is None:
        return ""
    return f"{value:.4g}" if error is None else f"{value:.3f} ± {error:.3f}"


def prediction_table(predictions: dict[str, list[dict[str, float]]]) -> None:
    """Errors of a diffusion transformer's predictions beside its teacher's, by noise level."""
    columns = {"noise level": "number", **{f"error, {name}": "number" for name in predictions}, "cosine": "number"}
    last = list(predictions.values())[-1]
    rows: list[tuple[str, ...]] = []
    for number, row in enumerate(last):
        errors = [f"{one[number]['error']:.3f}" for one in predictions.values()]
        rows.append((f"{row['level']:g}", *errors, f"{row['cosine']:.3f}"))
    console().print(table(columns, rows, "predictions: |student - teacher| / |teacher|"))


def checks_table(title: str, checks: list[Check]) -> None:
    """What `linearize verify` found."""
    columns = {"check": "short", "result": "short", "difference": "number", "limit": "number", "detail": "text"}
    rows: list[tuple[str, ...]] = []
    for check in checks:
        numbers = ["" if value is None else f"{value:.1e}" for value in (check.difference, check.limit)]
        detail = check.detail or (FOUND.get(check.name, "") if check.status == "passed" else "")
        rows.append((check.name, check.status, *numbers, detail))
    out = console()
    out.print(table(columns, rows, title))
    if any(check.difference is not None for check in checks):
        out.print("difference: the largest of any logit or output, over the largest of all")
    undecided = sum(check.status in ("warning", "skipped") for check in checks)
    if undecided:
        out.print(f"{counted(undecided, 'check')} of {len(checks)} neither passed nor failed; --strict fails such")
    elif all(check.status == "passed" for check in checks):
        out.print(f"all {len(checks)} checks passed")


def files_table(files: dict[str, int], title: str) -> None:
    """What `linearize push` would upload: name -> bytes, and their sum."""
    rows = [(name, f"{size:,}") for name, size in [*files.items(), ("sum", sum(files.values()))]]
    console().print(table({"file": "text", "bytes": "number"}, rows, title))


# ---------------------------------------------------------------- results for people, on stdout


def runs_table(found: list[dict[str, Any]]) -> None:
    """One row a run; a damaged one says what is wrong with it."""
    columns = {"run": "text", "base": "text", "attention": "text", "at": "text"}
    images = any(one.get("unit") == "images" for one in found)
    columns |= {"trained on" if images else "tokens": "number", "x teacher": "number"}
    columns |= {"accuracy (teacher's)": "number"} if images else {}
    columns |= {"changed (UTC)": "short"}
    rows = []
    for one in found:
        if "error" in one:
            rows.append((one["run"], "", "", one["error"], *[""] * (len(columns) - 4)))
            continue
        ratio = "" if one["ppl_ratio"] is None else f"{one['ppl_ratio']:.3f}"
        attention = "+".join(one["mechanisms"]) + (f", softmax in {layers_named(one['kept'])}" if one["kept"] else "")
        changed = one["changed"][:16].replace("T", " ")
        count = asked_for(one["tokens"], one["unit"] == "images") if images else short(one["tokens"])
        cells: tuple[str, ...] = (one["run"], one["base"], attention, one["at"], count, ratio)
        if images:
            both = [percent(one[who]) for who in ("accuracy", "teacher_accuracy")]
            cells += (both[0] + f" ({both[1]})" * bool(both[1]),)
        rows.append((*cells, changed))
    results().print(table(columns, rows))


def race_table(plan: dict[str, Any]) -> None:
    """What the contestants of a race will do."""
    columns = {"contestant": "short", "what it does": "text", "softmax in": "short", "stages": "text"}
    columns |= {"minutes": "number"}
    rows = []
    for one in plan["contestants"]:
        if not one["chosen"]:
            continue
        stages = []
        for recipe in one["recipes"]:
            turned = f"layers {recipe['convert']['layers']}: " if len(one["recipes"]) > 1 else ""
            steps = ", ".join(f"{stage['name']} {counted(stage['steps'], 'step')}" for stage in recipe["stages"])
            stages.append(f"{turned}{steps}")
        minutes = "" if one["hours"] is None else f"{60 * one['hours']:.1f}"
        kept = one["recipes"][-1]["convert"]["keep_softmax"] or "none"
        rows.append((one["name"], f"{one['about']} ({one['source']})", kept, "\n".join(stages), minutes))
    out = console()
    out.print(table(columns, rows, f"{plan['race']}: {plan['tokens']:,} training tokens each"))
    out.print("minutes: training steps at the rates of the two stages of the common recipe, estimated from configs")


def mechanisms_table(found: list[dict[str, Any]]) -> None:
    """One row a mechanism."""
    columns = {"name": "short", "what it is": "text", "paper": "short", "direction": "text", "backends": "text"}
    rows = [(one["name"], one["title"], one["paper"], direction(one), ", ".join(one["backends"])) for one in found]
    results().print(table(columns, rows))


def mechanism_table(one: dict[str, Any]) -> None:
    """Everything about one mechanism."""
    out, example = results(), one["example"]
    out.print(f"{one['name']}: {one['title']} ({one['paper']})")
    out.print(f"{direction(one)}; backends: {', '.join(one['backends'])}\n\n{one['about']}\n")
    out.print(f"State, bytes per layer and sequence: {one['state_formula']}")
    if any(option["name"] == "window" for option in one["options"]) and one["name"] != "window":
        out.print("A window adds (window + sink) Hkv (D + Dv) numbers in the model's dtype; states are float32.")
    out.print(
        f"In {example['site']}, in 16 bits: {example['new_parameters']:,} new parameters and a state of "
        f"{size(example['state_bytes'])}. A KV cache of {example['tokens']:,} tokens takes "
        f"{size(example['cache_bytes'])}.\n"
    )
    columns = {"option": "short", "default": "short", "published": "short", "what it sets": "text"}
    rows = []
    for option in one["options"]:
        published = str(option["published"]) if option["published"] != option["default"] else ""
        meaning = f"{option['about']}: {values(option)}"
        rows.append((option["name"], str(option["default"]), published, meaning))
    out.print(table(columns, rows))
    if any(option["published"] != option["default"] for option in one["options"]):
        out.print("\n`--set faithful=true` starts from what is published.")


def presets_table(found: list[Preset]) -> None:
    """One row a preset."""
    results().print(table({"preset": "short", "what it does": "text"}, [(one.name, one.about) for one in found]))


def doctor_table(rows: list[tuple[str, str]]) -> None:
    """What `linearize doctor` found: for each thing a result, and its description."""
    results().print(table({"result": "short", "found": "text"}, rows))


def direction(one: dict[str, Any]) -> str:
    """Which models a mechanism is for."""
    return ", ".join(word for word in ("causal", "bidirectional") if one[word])


def values(option: dict[str, Any]) -> str:
    """What an option may be."""
    if option["type"] == "choice":
        return " | ".join(option["choices"])
    return f"{option['type']} {option['low']:g} to {option['high']:g}" if "low" in option else option["type"]
