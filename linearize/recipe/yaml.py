"""Parse YAML with positions, so that every mistake in a recipe is reported with its line and column.

The dialect is YAML 1.2's core schema rather than PyYAML's 1.1: `1e-3` is a number, `no` and `2024-01-01` are
text. Aliases and tags are refused: a recipe is plain data. Nothing here knows what a recipe contains, but for keys
that had another name once (renamed.py).
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import yaml  # type: ignore[import-untyped, unused-ignore]

from ..errors import LinearizeError, ResourceError, check_file, did_you_mean, near_path, quoted
from .presets import presets, recipes_folder
from .renamed import present_key

Keys = tuple[str | int, ...]

MAX_DEPTH = 32

_SCALARS: dict[str, tuple[str, Callable[[str], Any]]] = {
    "null": (r"null|Null|NULL|~|", lambda _: None),
    "bool": (r"true|True|TRUE|false|False|FALSE", lambda text: text.lower() == "true"),
    # Bounded, as Python refuses to convert thousands of digits.
    "int": (r"[-+]?[0-9](_?[0-9]){0,98}", int),
    "float": (r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?", float),
}


class _Loader(yaml.SafeLoader):  # type: ignore[misc, unused-ignore]
    yaml_implicit_resolvers: ClassVar[dict[str | None, list[Any]]] = {}  # a new table: none of YAML 1.1's
    depth = 0

    def compose_node(self, parent: Any, index: Any) -> Any:
        event = self.peek_event()
        if isinstance(event, yaml.AliasEvent):
            raise yaml.MarkedYAMLError(
                problem="aliases (*name) are not supported: write the value out", problem_mark=event.start_mark
            )
        if event.tag not in (None, "!"):
            raise yaml.MarkedYAMLError(problem=f"tags are not supported: {event.tag}", problem_mark=event.start_mark)
        if self.depth == MAX_DEPTH:
            raise yaml.MarkedYAMLError(problem="nested too deeply", problem_mark=event.start_mark)
        self.depth += 1
        node = super().compose_node(parent, index)
        self.depth -= 1
        if isinstance(node, yaml.ScalarNode):
            try:  # JSON writes emoji as two escapes, which PyYAML leaves as two halves
                node.value = node.value.encode("utf-16-le", "surrogatepass").decode("utf-16-le")
            except UnicodeDecodeError:
                raise yaml.MarkedYAMLError(problem="half of a surrogate pair", problem_mark=node.start_mark) from None
        return node


for _tag, (_pattern, _) in _SCALARS.items():
    _Loader.add_implicit_resolver(_tag, re.compile(f"(?:{_pattern})$"), None)


class Where(NamedTuple):
    """A sortable position: source 0 is the file, source n the n-th override; lines and columns from 1."""

    source: int
    line: int
    column: int


class _Problem(NamedTuple):
    where: Where
    keys: Keys
    text: str


class Document:
    """A YAML file with overrides applied: plain `data`, the place of each key and value, the problems found.

    Raises LinearizeError at once when there is no mapping to work on; everything else is collected, and
    raised by `check` as one message with a line per problem.
    """

    def __init__(self, path: Path, overrides: Sequence[str] = ()) -> None:
        self.path = path
        self.overrides = list(overrides)
        self._problems: list[_Problem] = []
        self._targets: dict[int, Keys] = {}  # of each override
        self._key_marks: dict[Keys, Where] = {}
        self._value_marks: dict[Keys, Where] = {}
        node = self._compose(_read(path), 0)
        if node is None:
            self.check()
            raise LinearizeError(f"{path}: the recipe is empty")
        self.data: Any = self._build(node, (), 0)
        if not isinstance(self.data, dict):
            self.problem((), f"a recipe is a mapping of keys to values, not {shown(self.data)}")
            self.check()
        for source, override in enumerate(self.overrides, start=1):
            self._override(override, source)

    def problem(self, keys: Keys, text: str, *, at_key: bool = False) -> None:
        """Note a problem at the value of `keys`, or at the key itself; for an absent one, at its parent."""
        marks = self._value_marks | self._key_marks if at_key else self._value_marks
        where = next(marks[keys[:n]] for n in range(len(keys), -1, -1) if keys[:n] in marks)
        self._note(where, keys, text)

    def overridden(self, keys: Keys) -> bool:
        """Whether an override, not the file, gives the value of `keys`."""
        return keys in self._value_marks and self._value_marks[keys].source > 0

    def check(self) -> None:
        """Raise everything noted so far, in the order of its position."""
        if self._problems:
            lines = [self._line(problem) for problem in sorted(self._problems, key=lambda p: p.where)]
            raise LinearizeError("\n".join(lines))

    def substitute(self, variable: str) -> None:
        """Replace `${variable}`, a top-level key's value, in all other texts; any other `${` is a problem."""
        known, value = f"${{{variable}}}", str(self.data.get(variable))

        def walk(item: Any, keys: Keys) -> Any:
            if isinstance(item, dict):
                return {k: v if (*keys, k) == (variable,) else walk(v, (*keys, k)) for k, v in item.items()}
            if isinstance(item, list):
                return [walk(child, (*keys, i)) for i, child in enumerate(item)]
            if not isinstance(item, str):
                return item
            for found in re.findall(r"\$\{[^}]*\}?", item):
                if found != known:
                    self.problem(keys, f"unknown substitution {found!r}; the only one is {known}")
            return item.replace(known, value)

        self.data = walk(self.data, ())

    def _note(self, where: Where, keys: Keys, text: str) -> None:
        self._problems.append(_Problem(where, keys, text))

    def _line(self, problem: _Problem) -> str:
        where, name = problem.where, dotted(problem.keys)
        if where.source:
            given = self._targets.get(where.source, ())
            if problem.keys[: len(given)] == given:  # it may name a stage, which is a number among the keys
                name = dotted(problem.keys[len(given) :])
            place = f"override {self.overrides[where.source - 1]!r}"
        elif self.path.parent != recipes_folder():
            return f"{self.path}:{where.line}:{where.column}{name and ' ' + name}: {problem.text}"
        elif problem.keys == ("model", "base"):  # a preset leaves it to the command line
            add = f"add model.base=MODEL (or copy the preset: linearize recipes cp {self.path.stem} mine.yaml)"
            return f"{self.path.stem} names no model: {add}"
        else:
            place = f"preset {self.path.stem}"
        return ": ".join(filter(None, (place, name, problem.text)))

    def _compose(self, text: str, source: int) -> Any:
        """The node tree of `text`, or None when there is none or a syntax error was noted."""
        line, column = 0, 0
        try:
            loader = _Loader(text)
            try:
                return loader.get_single_node()
            except yaml.MarkedYAMLError as error:
                mark = error.problem_mark or error.context_mark or loader.get_mark()
                reason = ", ".join(part for part in (error.context, error.problem) if part)
            except (ValueError, OverflowError):  # PyYAML converts "\U99999999" without looking
                mark, reason = loader.get_mark(), "an escape that is no character"
            line, column = mark.line, mark.column
        except yaml.reader.ReaderError as error:
            before = text[: error.position]
            line, column = before.count("\n"), len(before) - before.rfind("\n") - 1
            reason = f"the character {chr(error.character)!r} is not allowed"
        self._note(Where(source, line + 1, column + 1), (), f"not valid YAML: {reason}")
        return None

    def _build(self, node: Any, keys: Keys, source: int) -> Any:
        self._value_marks[keys] = _where(node, source)
        if isinstance(node, yaml.ScalarNode):
            return _scalar(node)
        if isinstance(node, yaml.SequenceNode):
            return [self._build(child, (*keys, i), source) for i, child in enumerate(node.value)]
        data: dict[str, Any] = {}
        written: dict[str, str] = {}  # the name in the file, which may be an old one
        for key_node, value_node in node.value:
            where = _where(key_node, source)
            if not isinstance(key_node, yaml.ScalarNode):
                self._note(where, keys, "a key must be plain text")
                continue
            key = present_key(keys[-1] if keys else None, key_node.value)
            child = (*keys, key)
            if key in data:
                first, names = self._key_marks[child], {written[key], key_node.value}
                other = f": {written[key]} and {key_node.value} are one" if len(names) > 1 else ""
                self._note(where, child, f"duplicate key, first at {first.line}:{first.column}{other}")
                continue
            written[key] = key_node.value
            self._key_marks[child] = where
            data[key] = self._build(value_node, child, source)
        return data

    def _override(self, text: str, source: int) -> None:
        where = Where(source, 1, 1)
        name, equals, value = text.partition("=")
        if not equals or not re.fullmatch(r"[\w-]+(\.[\w-]+|\[\d+\])*", name):
            self._note(where, (), "expected key.sub=value")
            return
        found = len(self._problems)
        node = self._compose(value, source)
        if len(self._problems) > found:
            return
        try:
            parent, keys = self._reach(re.findall(r"[\w-]+", name), where)
        except LookupError as error:
            self._note(where, (), error.args[0])
            return
        self._targets[source] = keys
        for marks in (self._key_marks, self._value_marks):
            for stale in [known for known in marks if known[: len(keys)] == keys]:
                del marks[stale]
        self._key_marks[keys] = self._value_marks[keys] = where
        parent[keys[-1]] = self._build(node, keys, source) if node is not None else None

    def _reach(self, steps: list[str], where: Where) -> tuple[Any, Keys]:
        """What holds the last of `steps`, with absent mappings created on the way, and the full keys."""
        container: Any = self.data
        keys: Keys = ()
        for step in steps:
            if keys:
                if isinstance(container, dict) and container.get(keys[-1]) is None:
                    container[keys[-1]] = {}
                    self._key_marks[keys] = self._value_marks[keys] = where
                container = container[keys[-1]]
            if isinstance(container, list):
                keys = (*keys, _index(container, step, keys))
            elif isinstance(container, dict):
                keys = (*keys, present_key(keys[-1] if keys else None, step))
            else:
                raise LookupError(f"{dotted(keys)} is {shown(container)} and has no keys")
        return container, keys


def dotted(keys: Keys) -> str:
    """`stages[1].optimizer.lr`; keys that are no words are quoted."""

    def step(key: str | int) -> str:
        return f".{key}" if isinstance(key, str) and re.fullmatch(r"[\w-]+", key) else f"[{key!r}]"

    return "".join(map(step, keys)).removeprefix(".")


def shown(value: Any) -> str:
    """A value as a message names it: scalars as YAML has them, containers by kind."""
    if isinstance(value, dict):
        return "a mapping"
    if isinstance(value, list | tuple):
        return "a list"
    text = json.dumps(value) if value is None or isinstance(value, bool) else repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def _read(path: Path) -> str:
    check_file(path)
    try:
        return path.read_text(encoding="utf-8-sig")
    except FileNotFoundError:
        near = near_path(path, "*.y*ml")
        if any(shipped.name == path.stem for shipped in presets()):
            near += f" There is a preset of that name: {path.stem}"
        raise LinearizeError(f"no recipe file {str(path)!r}{near and '.'}{near}") from None
    except UnicodeDecodeError as error:
        raise LinearizeError(f"{path}: not UTF-8 text (byte {error.start})") from None
    except IsADirectoryError:
        way = f"Name a recipe or a preset; a model goes into it: hybrid model.base={quoted(path)}"
        raise LinearizeError(f"{path} is a folder, not a recipe file. {way}") from None
    except OSError as error:
        raise ResourceError(f"cannot read {path}: {error.strerror}") from None


def _where(node: Any, source: int) -> Where:
    return Where(source, node.start_mark.line + 1, node.start_mark.column + 1)


def _scalar(node: Any) -> Any:
    convert = _SCALARS[node.tag][1] if node.tag in _SCALARS else str
    value = convert(node.value)
    # 1e999 stays text, so that it is refused wherever a number is due and never becomes JSON's Infinity.
    return value if not isinstance(value, float) or math.isfinite(value) else node.value


def _index(items: list[Any], step: str, keys: Keys) -> int:
    """The position that an override's step names: a number, or the name (else kind) of an entry."""
    names = [item.get("name") or item.get("kind") if isinstance(item, dict) else None for item in items]
    if step in names:
        return names.index(step)
    if step.isdecimal() and int(step) < len(items):
        return int(step)
    known = [name for name in names if isinstance(name, str)]
    entries = ", ".join(known) or f"{len(items)}, counted from 0"
    raise LookupError(f"{dotted(keys)} has no entry {step!r}.{did_you_mean(step, known)} Entries: {entries}")
