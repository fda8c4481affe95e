"""`linearize convert`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..errors import LinearizeError
from ..plan.keep import LONGEST, MEANING, METHODS, UNSCORED, KeptWindow, regrouped, written
from ..terminal.arguments import DTYPES, LEVELS, Revision, Trust, check_base, one_of, path
from ..terminal.arguments import model as model_name
from ..terminal.output import Json, counted, layers_named, nats, print_json, ranges, say, size
from ..terminal.progress import starting, uncollected
from ..terminal.tables import alike, attention, chosen_options, console, table

if TYPE_CHECKING:
    from ..plan.keep import Choice, WindowChoice
    from ..plan.plan import Plan


def convert(
    context: typer.Context,
    model: Annotated[
        str,
        typer.Argument(
            metavar="MODEL|RECIPE",
            help="Model: a local folder, a Hub id, or demo. Or a recipe that says how to convert: a file, or a preset "
            "(list: linearize recipes ls).",
        ),
    ],
    values: Annotated[
        list[str] | None,
        typer.Argument(
            help="After a model: mechanism options as key=value (list: linearize mechanisms NAME), key@0-3=value for "
            "some layers. After a recipe: recipe values as key.sub=value, for example model.base=MODEL."
        ),
    ] = None,
    to: Annotated[
        str | None,
        typer.Option(
            "--to",
            help="Mechanism that replaces softmax (list: linearize mechanisms). Default for a converted MODEL: the one "
            "that it has, with the same options.",
        ),
    ] = None,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Folder to write. Default: ./NAME-MECHANISM.", parser=path)
    ] = None,
    layers: Annotated[
        str, typer.Option(help="Layers to make linear: all, 0-3,7 or every:2. In a converted MODEL: further ones.")
    ] = "all",
    restore: Annotated[str, typer.Option(help="Layers of a converted MODEL that get softmax back: 3 or 0-3,7.")] = "",
    keep_softmax: Annotated[
        str, typer.Option(help="Layers that keep softmax: 7,15, every:4, or auto:2 (auto:25%) to let linearize choose.")
    ] = "",
    keep_heads: Annotated[
        str,
        typer.Option(
            help="Heads of converted layers that keep softmax, by layer and KV head: '3:0,1;7:2', or auto:4 (auto:2%) "
            "to let linearize choose."
        ),
    ] = "",
    kept_window: Annotated[
        str | None,
        typer.Option(
            help="Window of the layers that keep softmax: they see this many of the last tokens, and the first four. "
            "4096: in all of them. 4096@1,3: in layers 1 and 3. auto:4096: where it changes predictions by at most "
            "0.01 nats a token (auto:4096:0.02: another limit)."
        ),
    ] = None,
    score_by: Annotated[
        str,
        typer.Option(
            help="How auto scores layers or heads: restore (starts all linear, gives softmax back one by one) "
            "or swaps (makes one at a time linear; faster).",
            callback=one_of("--score-by", METHODS),
        ),
    ] = "restore",
    score_text: Annotated[
        Path | None,
        typer.Option(
            help="Text to measure on, for auto and --kept-window: .txt, .jsonl, .jsonl.gz, .jsonl.zst or .parquet. "
            "Default for auto: Python sources. Its documents have to be longer than a window.",
            parser=path,
        ),
    ] = None,
    settings: Annotated[
        list[str] | None, typer.Option("--set", help="Mechanism option as key=value, also with a recipe. Repeatable.")
    ] = None,
    allow_drop: Annotated[
        list[str] | None,
        typer.Option("--allow-drop", help="Accept losing this attention feature, for example alibi. Repeatable."),
    ] = None,
    dtype: Annotated[
        str,
        typer.Option(
            help="Dtype of the result: keep, float32, bfloat16, float16 or float64.",
            callback=one_of("--dtype", (*DTYPES, "float64")),
        ),
    ] = "keep",
    dry_run: Annotated[
        bool,
        typer.Option("--dry-run", help="Print the plan and stop. Reads no weights, except for auto and --score-text."),
    ] = False,
    copy: Annotated[
        bool, typer.Option("--copy", help="Copy the source's shards. Default: hard links where the disk allows them.")
    ] = False,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace a folder that linearize wrote.")] = False,
    trust_remote_code: Trust = False,
    revision: Revision = None,
    verify: Annotated[
        str,
        typer.Option(
            help="Check of the result: full, keys (no logits) or none. auto: full, but with little memory only the "
            "first layers, or keys.",
            callback=one_of("--verify", LEVELS),
        ),
    ] = "auto",
    push: Annotated[str | None, typer.Option(help="Upload the result to this Hub repository (user/repo).")] = None,
    as_json: Json = False,
) -> None:
    """Replace softmax attention and write an ordinary Hugging Face model folder.

    With a recipe, its `convert` and `model` say how; options given here override it.
    """
    from ..checkpoint.atomic import check_target
    from ..plan.mechanisms import check_name
    from ..recipe.presets import is_recipe

    if to is not None:
        check_name(to)
    of_recipe: Any = None
    by_recipe, recipe_name = is_recipe(model, values or []), model
    if not by_recipe:
        named = next((word for word in values or [] if "=" not in word and is_recipe(word)), None)
        if named is not None:
            raise LinearizeError(f"{named}: a recipe stands first: linearize convert {named} model.base={model}")
        model = model_name(model)
    check_base(values or [])
    if by_recipe:
        if restore:
            raise LinearizeError(f"--restore {restore}: recipes convert models with softmax. Name the converted folder")
        with uncollected():
            of_recipe = asked_recipe(context, model, values or [])
        model = model_name(of_recipe.model.base)
    if output is not None and not dry_run:  # planning may measure layers for minutes
        check_target(Path(model), output, overwrite)
    with starting():
        from ..plan.mechanisms import parse_settings
        from ..plan.plan import make_steps

        if to is not None and not by_recipe:  # refuse a wrong option before transformers' models are imported
            make_steps([], to, parse_settings([*(values or []), *(settings or [])]))
        from .. import convert as of_transformers
        from ..diffusion import convert as of_diffusers
        from ..hub import push as hub
        from ..plan.keep import is_auto

    seed, asked = 0, dict[str, Any]()
    if by_recipe:
        from ..job.source import asked_of

        seed, how = of_recipe.seed, of_recipe.convert
        to, score_by, asked = how.mechanism, how.score_by, asked_of(of_recipe, how)
    else:
        asked = {"layers": layers, "keep_softmax": keep_softmax, "keep_heads": keep_heads, "kept_window": kept_window}
        asked |= {"options": parse_settings([*(values or []), *(settings or [])]), "dtype": dtype, "copy": copy}
        asked |= {"allow_drop": [name.strip() for text in allow_drop or [] for name in text.split(",")]}
        asked |= {"revision": revision, "trust_remote_code": trust_remote_code}
    story: Any = of_diffusers if of_diffusers.holds_diffusers(model) else of_transformers
    if push is not None and story is of_diffusers:
        raise LinearizeError("--push: upload a pipeline of diffusers when it is there: linearize push DIR user/repo")
    if push is not None:
        hub.check_name(push) if dry_run else hub.check_access(push)
    scored = any(is_auto(asked[key]) for key in ("keep_softmax", "keep_heads", "kept_window"))
    priced = score_text is not None and asked["kept_window"] is not None
    if score_text is not None and not (scored or priced):
        raise LinearizeError(
            f"--score-text {score_text}: nothing is measured on it. Give it with --keep-softmax auto:2, --keep-heads "
            "auto:4 or --kept-window 4096, or leave it out"
        )
    measures = (scored or priced) and story is of_transformers
    if measures:
        asked |= of_scoring(score_by, score_text, of_recipe)
    planned = story.plan_conversion(model, to, restore=restore, weights=not dry_run or measures, **asked)
    plan = planned[0]
    plan_table(plan)
    if story is of_transformers and (note := story.slower(*planned)):
        say(note)
    left = story.unread(*planned[1:])
    if left:
        say(of_transformers.UNREAD.format(", ".join(left)))
    result: dict[str, Any] = {"plan": plan.to_json(), "not_carried": left}
    target = output or Path(name_of(plan))
    if not dry_run:
        trust_remote_code = asked["trust_remote_code"]
        carried = {"overwrite": overwrite, "level": verify, "trust_remote_code": trust_remote_code, "seed": seed}
        checked = story.convert(*planned, target, **carried, say=say)
        new = ", whose new parameters are untrained" if plan.new_parameters and not plan.reconversions else ""
        told = (recipe_name, *(values or [])) if by_recipe else ()
        say(f"saved {target}{new}. Next: {story.next_step(plan, target, planned[2], told)}")
        result |= {"output": str(target), "verified": checked}
        if push is not None:
            result["pushed"] = hub.push_saved(target, push, trust_remote_code, say)
    else:
        say(f"dry run: a real run writes {target}")
        try:
            of_transformers.check_paths(planned[1], target, overwrite)
        except LinearizeError as error:
            say(f"note: a real run is refused: {error.message}")
    if as_json:
        print_json(result)


def name_of(plan: Any) -> str:
    """The folder that a conversion writes where none is named: that of the model, and what its new layers are."""
    if not plan.reconversions:
        return f"{Path(plan.source).name}-{plan.linear[0].mechanism}"
    done = plan.reconversions[-1]
    new = {step.mechanism for step in plan.steps if step.site.path in done.added}
    return f"{Path(done.folder).name}-{min(new, default='more-softmax')}"


def asked_recipe(context: typer.Context, recipe: str, values: list[str]) -> Any:
    """A recipe with the values that were given, and with the options of the command line, which come last.

    Raises LinearizeError (exit 2) for a recipe that converts nothing, or starts from a random model.
    """
    from ..diffusion.recipe import load_either
    from ..job.source import KEYS
    from ..recipe.models import Scratch

    given = list(values)
    keys = {option.replace("-", "_"): f"convert.{key}" for option, key in KEYS.items()}
    keys |= {"copy": "convert.copy_weights"}
    keys |= {name: f"model.{name}" for name in ("dtype", "revision", "trust_remote_code")}
    for name, key in keys.items():
        source = context.get_parameter_source(name)
        if source is not None and source.name == "COMMANDLINE":
            value = context.params[name]
            if name == "allow_drop":
                value = [one.strip() for text in value for one in text.split(",")]
            given.append(f"{key}={json.dumps(None if (name, value) == ('dtype', 'keep') else value)}")
    given += [f"convert.options.{setting}" for setting in context.params["settings"] or []]
    found: Any = load_either(recipe, given)
    if found.convert is None:
        raise LinearizeError(f"{recipe}: convert is null, so nothing is converted. Give --to and a model instead")
    if isinstance(found.model.base, Scratch):
        raise LinearizeError(f"{recipe}: model.base is a random model, which linearize finetune makes and converts")
    return found


def of_scoring(method: str, text: Path | None, recipe: Any = None) -> dict[str, Any]:
    """How `auto` compares layers, heads and windows, and on what a window of named layers is measured, as arguments.
    Without a `text` of its own it is that of the recipe, where there is one. Raises LinearizeError (exit 2) for text
    that is not there."""
    from ..choose.choose import Scoring, choosers, pricer
    from ..data.documents import TextSource
    from ..errors import absent, check_file
    from ..recipe.data import unreadable

    if text is None and recipe is not None:
        from ..job.source import scoring_of

        return choosers(scoring_of(recipe, recipe.convert, say))
    scoring: dict[str, Any] = {"method": method, "say": say}
    if text is not None:
        if reason := unreadable(text.name):
            raise LinearizeError(f"--score-text {text}: {reason}")
        if not text.exists():
            raise absent(text)
        check_file(text)
        scoring["text"] = TextSource(files=(text,), set_key="")
    found = Scoring(**scoring)
    return choosers(found) | ({} if text is None else {"price": pricer(found)})


def plan_table(plan: Plan) -> None:
    """What becomes what, and what it costs."""
    from rich.text import Text

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
        out.print(f"softmax stays in KV heads (layer:head) {written(plan.softmax_groups)}")
    for other in plan.others:
        out.print(f"stays as it is: {other}")
    for note in plan.notes:
        out.print(Text("dropped", "yellow"), note)


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
    mean = ", the mean of text and repetition" if choice.recalls else ""
    out.print(f"the loss is {choice.measured}, as a share of that with no {what} kept{mean}")
    texts = counted(choice.recalls, "text that asks", "texts that ask")
    recall = f" and {texts} for a repetition" if choice.recalls else ""
    if choice.lacking:
        recall = f" alone ({choice.lacking})"
    # Earlier versions did not say; images have one.
    rows = "images" if choice.seq_len == 1 else f"tokens in rows of {choice.seq_len:,}" if choice.seq_len else "tokens"
    others = f"with {choice.stand_in} in the other layers" if choice.stand_in else "mixers trained for a moment"
    out.print(f"scored on {choice.tokens:,} {rows} of {choice.text}{recall}, {others}")
    for kind, linear in choice.kl["linear"].items():
        these = nats(choice.kl["kept"][kind])
        out.print(f"{choice.measured}, {kind}: {nats(linear)} with no {what} kept, {these} with these")
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
