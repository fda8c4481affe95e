"""No file of the package imports itself through others, imports inside functions counted."""

from __future__ import annotations

import ast
import graphlib
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]


def imports_of(folder: Path, package: str) -> dict[str, set[str]]:
    """Module name -> names of the modules of the same package that it imports; those for type checkers do not count."""
    modules = {}
    for path in folder.rglob("*.py"):
        parts = [package, *path.relative_to(folder).with_suffix("").parts]
        inside = parts[:-1]
        modules[".".join(inside if parts[-1] == "__init__" else parts)] = (path, inside)
    found: dict[str, set[str]] = {}
    for module, (path, inside) in modules.items():
        wanted = imported(ast.parse(path.read_text("utf-8")), inside)
        found[module] = {next((name for name in names if name in modules), "") for names in wanted} - {""}
    return found


def imported(tree: ast.AST, package: list[str]) -> Iterator[tuple[str, ...]]:
    """What each import may mean, most precise first: `from .a import b` is the module a.b, or a name in a."""
    pending = [tree]
    while pending:
        node = pending.pop()
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            continue
        pending += ast.iter_child_nodes(node)
        if isinstance(node, ast.Import):
            yield from ((alias.name,) for alias in node.names)
        elif isinstance(node, ast.Call) and getattr(node.func, "id", "") == "import_module":
            yield from late(node, package)
        elif isinstance(node, ast.ImportFrom):
            above = package[: len(package) - node.level + 1] if node.level else []
            base = ".".join([*above, *([node.module] if node.module else [])])
            yield from ((f"{base}.{alias.name}", base) for alias in node.names)


def late(call: ast.Call, package: list[str]) -> Iterator[tuple[str, ...]]:
    """What `import_module("..a.b", __package__)` means: the module a.b beside the package of the file."""
    name = call.args[0]
    if isinstance(name, ast.Constant) and str(name.value).startswith("."):
        dots = len(name.value) - len(name.value.lstrip("."))
        yield (".".join([*package[: len(package) - dots + 1], name.value.lstrip(".")]),)


def cycle(graph: dict[str, set[str]]) -> list[str]:
    """One cycle of a graph, or nothing."""
    try:
        graphlib.TopologicalSorter(graph).prepare()
    except graphlib.CycleError as error:
        return error.args[1]
    return []


@pytest.mark.parametrize(("folder", "package"), [("linearize", "linearize"), ("kernels", "linearize_kernels")])
def test_no_file_imports_itself_through_others(folder: str, package: str) -> None:
    graph = imports_of(ROOT / folder, package)
    assert any(graph.values())
    assert cycle(graph) == []


@pytest.mark.parametrize(
    "line",
    ["from .b import x", "def f():\n    from . import b", "import p.b", 'import_module(".b", __package__)'],
)
def test_a_cycle_is_seen(tmp_path: Path, line: str) -> None:
    (tmp_path / "a.py").write_text(line, "utf-8")
    (tmp_path / "b.py").write_text("from p.a import y", "utf-8")
    assert set(cycle(imports_of(tmp_path, "p"))) == {"p.a", "p.b"}


def test_imports_for_type_checkers_do_not_count(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text("if TYPE_CHECKING:\n    from .b import x", "utf-8")
    (tmp_path / "b.py").write_text("from .a import y", "utf-8")
    assert cycle(imports_of(tmp_path, "p")) == []
