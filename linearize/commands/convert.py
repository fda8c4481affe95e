"""`linearize convert`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from ..errors import LinearizeError
from ..terminal.arguments import model as model_name
from ..terminal.arguments import path
from ..terminal.output import Json, print_json, say
from ..terminal.progress import starting


def convert(
    context: typer.Context,
    model: Annotated[
        str,
        typer.Argument(
            metavar="MODEL|RECIPE",
            help="Model: a local folder, a Hub id, or demo. Or a recipe, which says how to convert: a file, or a "
            "preset's name (list: linearize recipes ls).",
        ),
    ],
    values: Annotated[
        list[str] | None,
        typer.Argument(
            help="Of a model: mechanism options as key=value (list: linearize mechanisms NAME), or key@0-3=value for "
            "some layers. Of a recipe: its values as key.sub=value, such as model.base=MODEL."
        ),
    ] = None,
    to: Annotated[
        str | None,
        typer.Option(
            "--to",
            help="Mechanism that replaces softmax (list: linearize mechanisms). Default for a converted MODEL: its "
            "own, with its options.",
        ),
    ] = None,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Folder to write. Default: ./NAME-MECHANISM.", parser=path)
    ] = None,
    layers: Annotated[
        str,
        typer.Option(help="Layers to make linear: all, 0-3,7 or every:2. In a converted MODEL: further ones."),
    ] = "all",
    restore: Annotated[str, typer.Option(help="Layers of a converted MODEL that get softmax back: 3 or 0-3,7.")] = "",
    keep_softmax: Annotated[
        str,
        typer.Option(help="Layers that keep softmax: 7,15, every:4, or auto:2 (auto:25%) to let linearize choose."),
    ] = "",
    keep_heads: Annotated[
        str,
        typer.Option(
            help="Heads of converted layers that keep softmax, by layer and key head: '3:0,1;7:2', or auto:4 (auto:2%) "
            "to let linearize choose."
        ),
    ] = "",
    kept_window: Annotated[
        str | None,
        typer.Option(
            help="Tokens that layers with softmax see, beside the first four. 4096: all of these layers. 4096@1,3: "
            "these alone. auto:4096: those whose predictions change by at most 0.01 nats a token (auto:4096:0.02: "
            "another limit). The plan prints the cost, if --score-text is given or layers are chosen."
        ),
    ] = None,
    score_by: Annotated[
        str,
        typer.Option(
            help="How auto compares layers or heads: restore (gives softmax back to one after the other), swaps (makes "
            "one at a time linear, fastest) or gates (learns how much softmax each needs)."
        ),
    ] = "restore",
    score_text: Annotated[
        Path | None,
        typer.Option(
            help="Text for auto and for the cost of --kept-window: .txt, .jsonl, .jsonl.gz, .jsonl.zst or .parquet. "
            "Default for auto: Python sources. For a window it must have documents that are longer than the window.",
            parser=path,
        ),
    ] = None,
    settings: Annotated[
        list[str] | None,
        typer.Option("--set", help="Mechanism option as key=value, also beside a recipe. Repeatable."),
    ] = None,
    allow_drop: Annotated[
        list[str] | None,
        typer.Option("--allow-drop", help="Accept losing this attention feature, for example alibi. Repeatable."),
    ] = None,
    dtype: Annotated[
        str, typer.Option(help="Dtype of the result: keep, float32, bfloat16, float16 or float64.")
    ] = "keep",
    dry_run: Annotated[
        bool,
        typer.Option(
            "--dry-run",
            help="Print the plan and stop. Reads no weights, except for auto and --score-text.",
        ),
    ] = False,
    copy: Annotated[
        bool, typer.Option("--copy", help="Copy the source's shards. Default: hard links where the disk allows them.")
    ] = False,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace a folder that linearize wrote.")] = False,
    trust_remote_code: Annotated[
        bool, typer.Option("--trust-remote-code", help="Run Python code of the model that linearize did not write.")
    ] = False,
    revision: Annotated[str | None, typer.Option(help="Branch, tag or commit of a model on the Hub.")] = None,
    verify: Annotated[
        str,
        typer.Option(
            help="Check of the result: full, keys (no logits) or none. auto: full; where memory is short the first "
            "layers alone, or keys."
        ),
    ] = "auto",
    push: Annotated[str | None, typer.Option(help="Upload the result to this Hub repository (user/repo).")] = None,
    as_json: Json = False,
) -> None:
    """Replace softmax attention and write an ordinary Hugging Face model folder.

    With a recipe, its `convert` and `model` say how, and options given here come before it.
    """
    if verify not in ("auto", "full", "keys", "none"):
        raise LinearizeError(f"--verify {verify}: choose auto, full, keys or none")
    from ..plan.mechanisms import check_name
    from ..recipe.presets import is_recipe

    if to is not None:
        check_name(to)
    of_recipe: Any = None
    if not is_recipe(model, values or []):
        model = model_name(model)
    with starting():
        from ..plan.mechanisms import parse_settings
        from ..plan.plan import make_steps

        if to is not None:  # refuse a wrong option before transformers' models are imported
            make_steps([], to, parse_settings([*(values or []), *(settings or [])]))
        from .. import convert as of_transformers
        from ..diffusion import convert as of_diffusers
        from ..hub import push as hub
        from ..plan.keep import is_auto
        from ..terminal.tables import plan_table

    seed = 0
    if is_recipe(model, values or []):
        if restore:
            raise LinearizeError(
                f"--restore {restore}: a recipe converts a model with softmax. Name the converted folder"
            )
        of_recipe = asked_recipe(context, model, values or [])
        seed, how, model = of_recipe.seed, of_recipe.convert, model_name(of_recipe.model.base)
        to, layers, keep_softmax, keep_heads = how.mechanism, how.layers, how.keep_softmax, how.keep_heads
        kept_window, score_by, copy, allow_drop = how.kept_window, how.score_by, how.copy_weights, [*how.allow_drop]
        options, trust_remote_code = how.options, of_recipe.model.trust_remote_code
        dtype = getattr(of_recipe.model, "dtype", None) or "keep"
        revision = getattr(of_recipe.model, "revision", None)
    else:
        options = parse_settings([*(values or []), *(settings or [])])
    story: Any = of_diffusers if of_diffusers.holds_diffusers(model) else of_transformers
    if push is not None and story is of_diffusers:
        raise LinearizeError("--push: upload a pipeline of diffusers when it is there: linearize push DIR user/repo")
    if push is not None:
        hub.check_name(push) if dry_run else hub.check_access(push)
    if restore and story is of_diffusers:
        raise LinearizeError("--restore: of models of diffusers, convert the source again with other --layers")
    if to is None and story is of_diffusers:
        raise LinearizeError("--to is missing: name the mechanism, such as --to gsa")
    if keep_heads and story is of_diffusers:
        raise LinearizeError("--keep-heads: attention in diffusers pipelines is bidirectional; name layers to keep")
    scored = any(map(is_auto, (keep_softmax, keep_heads, kept_window)))
    priced = score_text is not None and kept_window is not None
    if score_text is not None and not (scored or priced):
        raise LinearizeError(
            f"--score-text {score_text}: nothing is measured on it. Give it with --keep-softmax auto:2, --keep-heads "
            "auto:4 or --kept-window 4096, or leave it out"
        )
    asked: dict[str, Any] = {}
    if (scored or priced) and story is of_transformers:
        asked = of_scoring(score_by, score_text, of_recipe)
    asked |= {"restore": restore, "keep_heads": keep_heads} if story is of_transformers else {}
    planned = story.plan_conversion(
        model,
        to,
        layers=layers,
        keep_softmax=keep_softmax,
        kept_window=kept_window,
        options=options,
        allow_drop=[name.strip() for text in allow_drop or [] for name in text.split(",")],
        dtype=dtype,
        copy=copy,
        revision=revision,
        trust_remote_code=trust_remote_code,
        weights=not dry_run or "choose" in asked,
        **asked,
    )
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
        carried = {"overwrite": overwrite, "level": verify, "trust_remote_code": trust_remote_code, "seed": seed}
        checked = story.convert(*planned, target, **carried, say=say)
        new = ", whose new parameters are untrained" if plan.new_parameters and not plan.reconversions else ""
        say(f"saved {target}{new}. Next: {story.next_step(plan, target)}")
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


# Options of this command that are values of a recipe, by their names there.
OF_RECIPE = {
    "to": "convert.mechanism",
    "layers": "convert.layers",
    "keep_softmax": "convert.keep_softmax",
    "keep_heads": "convert.keep_heads",
    "kept_window": "convert.kept_window",
    "score_by": "convert.score_by",
    "allow_drop": "convert.allow_drop",
    "copy": "convert.copy_weights",
    "dtype": "model.dtype",
    "revision": "model.revision",
    "trust_remote_code": "model.trust_remote_code",
}


def asked_recipe(context: typer.Context, recipe: str, values: list[str]) -> Any:
    """A recipe with the values that were given, and with the options of the command line, which come last.

    Raises LinearizeError (exit 2) for a recipe that converts nothing, or starts from a random model.
    """
    from ..diffusion.recipe import holds_latents, load_latents_recipe
    from ..recipe.models import Scratch
    from ..recipe.recipe import load_recipe

    given = list(values)
    for name, key in OF_RECIPE.items():
        source = context.get_parameter_source(name)
        if source is not None and source.name == "COMMANDLINE":
            value = context.params[name]
            if name == "allow_drop":
                value = [one.strip() for text in value for one in text.split(",")]
            given.append(f"{key}={json.dumps(None if (name, value) == ('dtype', 'keep') else value)}")
    given += [f"convert.options.{setting}" for setting in context.params["settings"] or []]
    found: Any = (load_latents_recipe if holds_latents(recipe, given) else load_recipe)(recipe, given)
    if found.convert is None:
        raise LinearizeError(f"{recipe}: convert is null, so nothing is converted. Give --to and a model instead")
    if isinstance(found.model.base, Scratch):
        raise LinearizeError(f"{recipe}: model.base is a random model, which linearize finetune makes and converts")
    return found


def of_scoring(method: str, text: Path | None, recipe: Any = None) -> dict[str, Any]:
    """How `auto` compares layers, heads and windows, and on what a window of named layers is measured, as arguments.
    Without a `text` of its own it is that of the recipe, where there is one. Raises LinearizeError (exit 2) for another
    method and for text that is not there."""
    from ..choose.choose import Scoring, choosers, pricer
    from ..data.documents import TextSource
    from ..errors import absent, check_file
    from ..plan.keep import check_method
    from ..recipe.data import SUFFIXES

    if text is None and recipe is not None:
        from ..job.source import scoring_of

        return choosers(scoring_of(recipe, recipe.convert, say))
    scoring: dict[str, Any] = {"method": check_method(method), "say": say}
    if text is not None:
        if not text.name.endswith(SUFFIXES):
            raise LinearizeError(f"--score-text {text}: must be a {', '.join(SUFFIXES)} file")
        if not text.exists():
            raise absent(text)
        check_file(text)
        scoring["text"] = TextSource(files=(text,), set_key="")
    found = Scoring(**scoring)
    return choosers(found) | ({} if text is None else {"price": pricer(found)})
