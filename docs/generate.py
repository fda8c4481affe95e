"""The pages below Reference, made from the code each time that the site is built (a hook of mkdocs).

    CLI          the Typer app: usage, arguments and options of every command
    Recipes      the JSON schema of recipes, and the presets with what their headers say was measured
    Mechanisms   `linearize.plan.mechanisms.describe`: options, ranges, defaults, size of the state
    API          one page for each package; mkdocstrings reads the docstrings

`pages()` needs no mkdocs, so that the tests can read them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import typer

from linearize.cli import app
from linearize.errors import Exit
from linearize.plan.mechanisms import describe, mechanism_names
from linearize.recipe.presets import presets
from linearize.recipe.schema import recipe_schema

ROOT = Path(__file__).resolve().parents[1]
FOLDER = "reference"


def pages() -> dict[str, str]:
    """Markdown of every generated page, by its path in the site."""
    return {f"{FOLDER}/{name}": text for name, text in [*_cli(), *_recipes(), *_mechanisms(), *_api()]}


def nav() -> list[dict[str, Any]]:
    """The navigation of these pages: titles and paths."""
    api = [{name: f"{FOLDER}/{path}"} for name, path in _api_paths()]
    options = [{name: f"{FOLDER}/mechanisms/{name}.md"} for name in mechanism_names()]
    return [
        {"Command line": f"{FOLDER}/cli.md"},
        {"Recipes": f"{FOLDER}/recipes.md"},
        {"Mechanisms": [f"{FOLDER}/mechanisms/index.md", *options]},
        {"Python API": [f"{FOLDER}/api/index.md", *api]},
    ]


# ---------------------------------------------------------------- what mkdocs calls


def on_config(config: Any) -> Any:
    """Put the generated pages into the navigation, where mkdocs.yml says GENERATED."""
    config.nav = [nav_item if "GENERATED" not in nav_item.values() else {"Reference": nav()} for nav_item in config.nav]
    return config


def on_files(files: Any, config: Any) -> Any:
    """Add the generated pages to the files of the site."""
    from mkdocs.structure.files import File

    for path, text in pages().items():
        files.append(File.generated(config, path, content=text))
    return files


# ---------------------------------------------------------------- command line


def commands(command: Any = None, path: tuple[str, ...] = ("linearize",)) -> Iterator[tuple[str, Any]]:
    """(words, command) of linearize and each of its commands and their subcommands, in the order of `--help`."""
    command = command or typer.main.get_command(app)
    yield " ".join(path), command
    for name, sub in getattr(command, "commands", {}).items():
        yield from commands(sub, (*path, name))


def _cli() -> Iterator[tuple[str, str]]:
    lines = ["# Command line", "", "What `linearize COMMAND --help` prints, and the exit codes.", ""]
    lines += ["## Exit codes", "", *_table(("code", "meaning"), ((int(code), meaning) for code, meaning in EXITS)), ""]
    for words, command in commands():
        lines += [f"## {words}", "", _escape(command.help or ""), "", "```", _usage(words, command), "```", ""]
        arguments = [one for one in command.params if one.param_type_name == "argument"]
        options = [one for one in command.params if one.param_type_name == "option" and not one.hidden]
        for title, found in (("argument", arguments), ("option", options)):
            if found:
                lines += [*_table((title, "value", "default", "what it does"), map(_parameter, found)), ""]
    yield "cli.md", "\n".join(lines)


EXITS = (
    (Exit.OK, "done"),
    (Exit.BUG, "a bug in linearize; the message says what to report"),
    (Exit.USAGE, "an option, an argument or a recipe is wrong"),
    (Exit.INCOMPATIBLE, "the model or the mechanism does not fit"),
    (Exit.RESOURCE, "disk, memory, a device or a package is missing"),
    (Exit.HUB, "the Hub or the network refused"),
    (Exit.CHECK_FAILED, "a check of the result failed"),
    (Exit.INTERRUPTED, "interrupted; the state is saved"),
    (Exit.CLOSED, "whoever read the output left before its end, as `head` does"),
)


def _usage(words: str, command: Any) -> str:
    parts = [words]
    if any(one.param_type_name == "option" for one in command.params):
        parts.append("[OPTIONS]")
    for one in command.params:
        if one.param_type_name == "argument":
            name = one.name.upper() + ("..." if one.nargs != 1 else "")
            parts.append(name if one.required else f"[{name}]")
    return " ".join([*parts, "COMMAND ..."] if hasattr(command, "commands") else parts)


def _parameter(one: Any) -> tuple[str, str, str, str]:
    names = one.name.upper() if one.param_type_name == "argument" else ", ".join((*one.opts, *one.secondary_opts))
    kind = "" if getattr(one, "is_flag", False) else _kind(one)
    default = "required" if one.required else "" if one.default in (None, False, "") else _value(one.default)
    return f"`{names}`", kind, default, _escape(one.help or "")


def _kind(one: Any) -> str:
    """What a parameter takes, from its annotation: text, number, path; with limits, and whether it is repeatable."""
    descriptor = getattr(one, "type_descriptor", None)  # of typer since it has no click
    kind = descriptor.annotation if descriptor else one.type.name
    words = {str: "text", int: "number", float: "number", Path: "path", list[str]: "text"}
    words |= {"integer": "number", "integer range": "number", "float range": "number"}
    low = getattr(one, "min", None) if descriptor else getattr(one.type, "min", None)
    kind = words.get(kind, str(kind)) + ("" if low is None else f" >= {low}")
    return kind + (", repeatable" if getattr(one, "multiple", False) or one.nargs == -1 else "")


# ---------------------------------------------------------------- recipes


def _recipes() -> Iterator[tuple[str, str]]:
    lines = ["# Recipes", "", "Every key that a recipe may have. `linearize recipes schema` prints the same as JSON,"]
    lines += ["for editors. `linearize recipes validate FILE` names each mistake with its line.", "", "## Presets", ""]
    lines += ["`linearize recipes show NAME` prints one, `linearize recipes cp NAME` copies it.", ""]
    for one in presets():
        lines += [f"### {one.name}", "", _escape(one.about), ""]
        lines += [*_table(("", "from its header"), ((key, _escape(text)) for key, text in one.measured.items())), ""]
    lines += ["## Keys", ""]
    for name, definition in recipe_schema()["$defs"].items():
        lines += [f"### {name}", "", _escape(definition.get("description", "")), ""]
        if "properties" in definition:
            required = definition.get("required", [])
            rows = [_key(key, one, key in required) for key, one in definition["properties"].items()]
            lines += [*_table(("key", "type", "default", "what it is"), rows), ""]
        else:
            lines += [_schema_type(definition), ""]
    yield "recipes.md", "\n".join(lines)


def _schema_type(one: dict[str, Any]) -> str:
    """A JSON schema in words, with links to the definitions that it names."""
    if "$ref" in one:
        name = one["$ref"].rpartition("/")[2]
        return f"[{name}](#{name.lower()})"
    for key in ("anyOf", "oneOf", "allOf"):
        if key in one:
            return " or ".join(dict.fromkeys(map(_schema_type, one[key])))
    if "const" in one:
        return f"`{one['const']}`"
    if "enum" in one:
        return " or ".join(f"`{choice}`" for choice in one["enum"])
    kind = one.get("type", "any")
    if kind == "array":
        return f"list of {_schema_type(one.get('items', {}))}" if "items" in one else "list"
    bounds = {"minimum": ">=", "exclusiveMinimum": ">", "maximum": "<=", "exclusiveMaximum": "<"}
    limits = " and ".join(f"{sign} {one[key]}" for key, sign in bounds.items() if key in one)
    return f"{kind} {limits}".strip().replace("object", "mapping")


def _key(key: str, one: dict[str, Any], required: bool) -> tuple[str, str, str, str]:
    given = "default" in one and "$ref" not in one  # a link leads to its defaults
    default = "required" if required else _value(one["default"]) if given else ""
    return f"`{key}`", _schema_type(one), default, _escape(one.get("description", ""))


# ---------------------------------------------------------------- mechanisms


def _mechanisms() -> Iterator[tuple[str, str]]:
    described = [describe(name) for name in mechanism_names()]
    rows = (
        (f"[`{name}`]({name}.md)", one["title"], one["paper"], _direction(one), ", ".join(one["backends"]))
        for one in described
        for name in [one["name"]]
    )
    lines = ["# Mechanisms", "", "What `linearize mechanisms` prints, and `linearize mechanisms NAME` of each.", ""]
    lines += _table(("name", "what it is", "paper", "attention", "runs on"), rows)
    yield "mechanisms/index.md", "\n".join(lines) + "\n"
    for one in described:
        yield f"mechanisms/{one['name']}.md", "\n".join(_mechanism(one))


def _direction(one: dict[str, Any]) -> str:
    return " and ".join(name for name in ("causal", "bidirectional") if one[name])


def _mechanism(one: dict[str, Any]) -> list[str]:
    name, example = one["name"], one["example"]
    lines = [f"# {name}: {one['title']}", "", f"Paper: {one['paper']}. For {_direction(one)} attention.", ""]
    lines += [_escape(one["about"]), "", "## Options", ""]
    lines += [f"`linearize convert MODEL --to {name} --set OPTION=VALUE`", ""]
    columns = ("option", "what it sets", "values", "default", "as published")
    lines += [*_table(columns, map(_option, one["options"])), ""]
    lines += ["`--set faithful=true` starts from what is published.", ""]
    lines += ["## State", "", f"Bytes for a layer and a sequence: {_escape(one['state_formula'])}.", ""]
    new, state, cache = (f"{example[key]:,}" for key in ("new_parameters", "state_bytes", "cache_bytes"))
    lines += [f"For {example['site']}, in 16 bits: {new} new parameters and {state} bytes of state."]
    lines += [f"The keys and values of {example['tokens']:,} tokens take {cache} bytes there."]
    return [*lines, ""]


def _option(one: dict[str, Any]) -> tuple[str, ...]:
    values = " or ".join(one["choices"]) if "choices" in one else one["type"]
    values += f" {one['low']:g} to {one['high']:g}" if "low" in one else ""
    published = "" if one["published"] == one["default"] else _value(one["published"])
    return f"`{one['name']}`", _escape(one["about"]), values, _value(one["default"]), published


# ---------------------------------------------------------------- Python


def _api_paths() -> list[tuple[str, str]]:
    """(title, path) of the API's pages: one for each package of both folders, and one for the files beside them."""
    return [(package, f"api/{package}.md") for package in _packages()]


def _packages() -> dict[str, list[str]]:
    """Modules by package: linearize, linearize.probe ..., linearize_kernels, linearize_kernels.gsa ..."""
    found: dict[str, list[str]] = {}
    for folder, name in (("linearize", "linearize"), ("kernels", "linearize_kernels")):
        for path in sorted((ROOT / folder).rglob("*.py")):
            parts = [name, *path.relative_to(ROOT / folder).with_suffix("").parts]
            if not path.stem.startswith("__") and not _left_out(path):
                found.setdefault(".".join(parts[:-1]), []).append(".".join(parts))
    return dict(sorted(found.items()))


def _left_out(path: Path) -> bool:
    """Commands, which have a page of their own, and what launches or holds Triton kernels, which nobody else calls."""
    return path.parent.name in ("commands", "gpu") or "@triton.jit" in path.read_text("utf-8")


def _api() -> Iterator[tuple[str, str]]:
    lines = ["# Python API", "", "What the docstrings say, by package. `linearize` is the tool. `linearize_kernels` is"]
    lines += ["the folder `kernels/`: the mechanisms, whose files travel with a converted model. Files that hold"]
    lines += ["Triton kernels, and commands, which [Command line](../cli.md) has, are left out.", ""]
    packages = _packages()
    lines += [f"- [{package}]({package}.md)" for package in packages]
    yield "api/index.md", "\n".join(lines) + "\n"
    for package, modules in packages.items():
        blocks = "\n".join(f"::: {module}\n" for module in modules)
        yield f"api/{package}.md", f"# {package}\n\n{blocks}"


# ---------------------------------------------------------------- text


def _table(head: tuple[str, ...], rows: Any) -> list[str]:
    lines = [f"| {' | '.join(head)} |", "|" + "---|" * len(head)]
    return lines + [f"| {' | '.join(str(cell).replace('|', chr(92) + '|') for cell in row)} |" for row in rows]


def _value(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value, default=str)
    return f"`{text}`"


def _escape(text: str) -> str:
    """Text of docstrings as Markdown: stars and underscores outside of code are characters."""
    parts = re.split(r"(`[^`]*`)", text)
    return "".join(part if part.startswith("`") else re.sub(r"([*_<\[])", r"\\\1", part) for part in parts)
