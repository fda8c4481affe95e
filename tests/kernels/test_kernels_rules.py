"""What kernels/ may look like, so that its files work as the remote code of a checkpoint. Proved on the source.

A loader copies the files that `from .name import x` lines lead to, flat, into a folder of its own, and imports them
where linearize is not installed. Parts that an option needs are imported late, by `import_module(".name",
__package__)`; a checkpoint that has them names them in modeling_linearized.py. Each rule is a function from source
text, as it travels, to complaints, and is seen to complain.
"""

from __future__ import annotations

import ast
import importlib.util
import re
import subprocess
import sys
import types
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from conftest import holds

from linearize.checkpoint.flatten import flattened, kernel_files, kernels_folder
from linearize.plan.mechanisms import mechanism_names

FILES = kernel_files()
NAMES = FILES.keys()
ALLOWED = {"torch", "transformers", *sys.stdlib_module_names}
READERS = {"open", "read_text", "read_bytes", "load", "get_data", "glob", "iterdir"}

PART = re.compile(r"import_module\('\.(\w+)', __package__\)")
# As transformers' loader of remote code finds them: at the start of any line, docstrings included.
FOLLOWED = re.compile(r"^\s*from\s+\.(\S*)\s+import", re.MULTILINE)


def imports(tree: ast.AST) -> Iterator[tuple[ast.Import | ast.ImportFrom, str]]:
    """Each import statement with the root package of what it imports; `` for relative ones."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node, alias.name.partition(".")[0]) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield node, "" if node.level else (node.module or "").partition(".")[0]


def guarded(tree: ast.AST) -> set[ast.AST]:
    """Every node in the body of a try that catches ImportError."""
    found: set[ast.AST] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Try) and any("ImportError" in ast.dump(h) for h in node.handlers):
            found |= {inner for statement in node.body for inner in ast.walk(statement)}
    return found


def foreign_imports(source: str) -> list[str]:
    """Only torch, transformers, the standard library, flat siblings, and triton inside a try."""
    tree = ast.parse(source)
    safe = guarded(tree)
    return [
        f"line {node.lineno}: imports {root}"
        for node, root in imports(tree)
        if root and root not in ALLOWED and not (root == "triton" and node in safe)
    ]


def hidden_siblings(source: str) -> list[str]:
    """Siblings are imported as `from .name import x`, at module level and at the start of a line; never `from . `."""
    tree = ast.parse(source)
    complaints = []
    for node, root in imports(tree):
        if root or not isinstance(node, ast.ImportFrom):
            continue
        if node.level > 1 or node.module is None or "." in node.module:
            complaints.append(f"line {node.lineno}: must be `from .name import x`")
        elif node not in tree.body or node.col_offset:
            complaints.append(f"line {node.lineno}: relative import inside a block")
        elif node.module not in NAMES:
            complaints.append(f"line {node.lineno}: no sibling {node.module}")
    statements = sum(isinstance(node, ast.ImportFrom) and node.level > 0 for node, _ in imports(tree))
    if len(FOLLOWED.findall(source)) != statements:
        complaints.append("a string has a line that reads like a relative import")
    return complaints


def late_imports(source: str) -> list[str]:
    """`import_module` gets the name of a sibling and `__package__`, and runs in a function."""
    tree, complaints = ast.parse(source), []
    early = {*map(id, executed_on_import(tree))}
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call) or not ast.unparse(node.func).endswith("import_module"):
            continue
        if not PART.fullmatch(ast.unparse(node)) or id(node) in early:
            complaints.append(f"line {node.lineno}: must be `import_module('.name', __package__)` in a function")
        elif PART.fullmatch(ast.unparse(node))[1] not in NAMES:
            complaints.append(f"line {node.lineno}: no sibling {ast.unparse(node.args[0])}")
    return complaints


def executed_on_import(tree: ast.Module) -> Iterator[ast.AST]:
    """Every node that runs when the module is imported: all but the bodies of functions."""
    pending: list[ast.AST] = [tree]
    while pending:
        node = pending.pop()
        yield node
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            pending += [*node.decorator_list, node.args]
        elif isinstance(node, ast.Lambda):
            pending.append(node.args)
        else:
            pending += ast.iter_child_nodes(node)


def reads_on_import(source: str) -> list[str]:
    """No file is opened while the module is imported."""
    complaints = []
    for node in executed_on_import(ast.parse(source)):
        if isinstance(node, ast.Call):
            name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            if name in READERS:
                complaints.append(f"line {node.lineno}: {name}() at import")
    return complaints


def stops_a_compiler(source: str) -> list[str]:
    """Nothing is asked that torch.compile of torch 2.11 cannot trace: every layer of a step would be cut in two."""
    names = {node.attr: node.lineno for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Attribute)}
    return [f"line {names[name]}: {name}" for name in ("is_autocast_available",) if name in names]


def mixer_and_naive_form(source: str, name: str) -> list[str]:
    """A mechanism file defines exactly one Mixer, its op and the op's slow twin."""
    body = ast.parse(source).body
    mixers = [n.name for n in body if isinstance(n, ast.ClassDef) and "Mixer" in map(ast.unparse, n.bases)]
    functions = {n.name for n in body if isinstance(n, ast.FunctionDef)}
    complaints = [] if len(mixers) == 1 else [f"defines {len(mixers)} mixers"]
    return complaints + [f"lacks {f}()" for f in (name, f"naive_{name}") if f not in functions]


RULES: list[Callable[[str], list[str]]] = [
    foreign_imports, hidden_siblings, late_imports, reads_on_import, stops_a_compiler,
]  # fmt: skip


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_every_file_keeps_the_rule(rule: Callable[[str], list[str]]) -> None:
    assert {name: found for name in FILES if (found := rule(flattened(FILES[name])))} == {}


@pytest.mark.parametrize("name", mechanism_names())
def test_a_mechanism_file_has_one_mixer_an_op_and_a_reference(name: str) -> None:
    assert mixer_and_naive_form(FILES[name].read_text("utf-8"), name) == []


BAD = [
    (foreign_imports, "import numpy as np"),
    (foreign_imports, "from linearize.plan.plan import Plan"),
    (foreign_imports, "from linearize_kernels.mixer import Mixer"),
    (foreign_imports, "def f():\n    import einops"),
    (foreign_imports, "import triton"),
    (foreign_imports, "import triton.language as tl"),
    (foreign_imports, "try:\n    import triton\nexcept ValueError:\n    pass"),
    (foreign_imports, "try:\n    pass\nexcept ImportError:\n    import triton"),
    (hidden_siblings, "from . import scan"),
    (hidden_siblings, "from ..linearize import plan"),
    (hidden_siblings, "from .deep.er import x"),
    (hidden_siblings, "from .nowhere import x"),
    (hidden_siblings, "def f():\n    from .scan import into_chunks"),
    (hidden_siblings, "if True:\n    from .scan import into_chunks"),
    (hidden_siblings, "try:\n    from .scan import into_chunks\nexcept ImportError:\n    pass"),
    (hidden_siblings, '"""Example:\n\nfrom .scan import into_chunks\n"""'),
    (hidden_siblings, 'TEXT = """\n    from .other import x\n"""'),
    (late_imports, "import_module('.scan', __package__)"),
    (late_imports, "def f():\n    import_module('.nowhere', __package__)"),
    (late_imports, "def f():\n    import_module('..layers.scan', __package__)"),
    (late_imports, "def f(name):\n    import_module(name, __package__)"),
    (late_imports, "def f():\n    importlib.import_module('.scan', __package__)"),
    (reads_on_import, "TEXT = open('x').read()"),
    (reads_on_import, "from pathlib import Path\nTEXT = Path('x').read_text()"),
    (reads_on_import, "class A:\n    text = Path('x').read_bytes()"),
    (reads_on_import, "def f(x=open('y')):\n    return x"),
    (reads_on_import, "TABLE = json.load(FILE)"),
    (stops_a_compiler, "def f(x):\n    return torch.amp.is_autocast_available(x)"),
]


@pytest.mark.parametrize(("rule", "source"), BAD)
def test_each_rule_complains_about_a_bad_source(rule: Callable[[str], list[str]], source: str) -> None:
    assert rule(source) != []


def test_rules_accept_what_is_allowed() -> None:
    source = '''"""A header that says where things come from."""
from __future__ import annotations
import math
import torch.nn.functional as F
from transformers import initialization as init
from .scan import into_chunks
try:
    import triton
    import triton.language as tl
except ImportError:
    triton = None
def read(path):
    import_module(".scan", __package__)
    return open(path).read()
'''
    assert [complaint for rule in RULES for complaint in rule(source)] == []


@pytest.mark.parametrize(
    ("source", "complaint"),
    [
        ("class A(Mixer): ...\nclass B(Mixer): ...\ndef x(): ...\ndef naive_x(): ...", "defines 2 mixers"),
        ("def x(): ...\ndef naive_x(): ...", "defines 0 mixers"),
        ("class A(Mixer): ...\ndef naive_x(): ...", "lacks x()"),
        ("class A(Mixer): ...\ndef x(): ...", "lacks naive_x()"),
    ],
)
def test_an_incomplete_mechanism_file_is_told(source: str, complaint: str) -> None:
    assert mixer_and_naive_form(source, "x") == [complaint]


def test_rooms_are_no_packages_and_their_files_have_names_of_their_own() -> None:
    entries = [path for path in kernels_folder().rglob("*") if "__pycache__" not in path.parts]
    assert sorted(path for path in entries if path.is_file()) == sorted(FILES.values())  # no two share a flat name
    assert "__init__" not in NAMES
    assert all(re.fullmatch(r"[a-z][a-z0-9_]*", path.stem) for path in entries)
    others = {*sys.stdlib_module_names, "torch", "transformers", "triton", "diffusers"}
    assert not {*NAMES, *(path.stem for path in entries)} & others


# Imports every file of a folder as a package called `flat`, in a process in which some packages cannot be found.
ALONE = '''
import importlib, sys, types

folder, names, absent = sys.argv[1], sys.argv[2].split(","), set(sys.argv[3].split(","))

class Without:
    """All finders of this process, blind for the absent packages."""
    finders = list(sys.meta_path)

    @classmethod
    def find_spec(cls, name, path=None, target=None):
        if name.partition(".")[0] not in absent:
            specs = (finder.find_spec(name, path, target) for finder in cls.finders)
            return next((spec for spec in specs if spec is not None), None)

    @classmethod
    def find_distributions(cls, *context):
        for finder in cls.finders:
            yield from getattr(finder, "find_distributions", lambda *_: ())(*context)

sys.meta_path[:] = [Without]
package = types.ModuleType("flat")
package.__path__ = [folder]
sys.modules["flat"] = package
for name in names:
    importlib.import_module("flat." + name)
'''
ABSENT = "triton,peft,accelerate,linearize,linearize_kernels"


def import_alone(folder: Path, names: list[str]) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", ALONE, str(folder), ",".join(names), ABSENT]
    return subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)


@pytest.mark.slow
def test_every_file_imports_where_only_torch_and_transformers_are(tmp_path: Path) -> None:
    for name, path in FILES.items():
        (tmp_path / f"{name}.py").write_text(flattened(path), "utf-8")
    result = import_alone(tmp_path, sorted(NAMES))
    assert result.returncode == 0, result.stderr


@pytest.mark.parametrize("package", ABSENT.split(","))
def test_an_import_of_an_absent_package_is_seen(tmp_path: Path, package: str) -> None:
    (tmp_path / "bad.py").write_text(f"import {package}\n", encoding="utf-8")
    assert holds(import_alone(tmp_path, ["bad"]).stderr, f"'{package}'")


WITHOUT_TRITON = """
import sys; sys.modules["triton"] = None
import torch
from linearize_kernels.gla import gla
from linearize_kernels.gsa import gsa
from linearize_kernels.la import la
from linearize_kernels.mhla import mhla
q, k, g, w = torch.rand(1, 5, 2, 16), torch.rand(1, 5, 1, 16), -torch.rand(1, 5, 1, 16), torch.rand(1, 4, 4)
for op, *last in ((gla.gla, g), (gsa.gsa, g), (la.la,), (mhla.mhla, w)):
    print(op(q, k, k, *last)[0].shape == q.shape)
    try:
        op(q, k, k, *last, backend="triton")
    except ValueError as error:
        print(error)
"""


def test_without_triton_the_cpu_path_works_and_triton_is_refused() -> None:
    done = subprocess.run([sys.executable, "-c", WITHOUT_TRITON], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[::2] == ["True"] * 4
    assert all("triton is not installed" in line for line in lines[1::2])
    assert len(lines) == 8


@pytest.mark.parametrize("flat", [name for name, f in FILES.items() if "= own_namespace(" in f.read_text("utf-8")])
def test_two_copies_keep_their_own_operators(flat: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a package of another name, and of the same name."""
    file = FILES[flat]
    place = ".".join(file.relative_to(kernels_folder()).with_suffix("").parts)
    name, before = f"linearize_kernels.{place}", {*sys.modules}
    first = importlib.import_module(name)
    package = types.ModuleType("copied")
    package.__path__ = [str(kernels_folder())]
    monkeypatch.setitem(sys.modules, "copied", package)
    second = importlib.import_module(f"copied.{place}")
    again = importlib.util.spec_from_file_location(name, file)
    third = importlib.util.module_from_spec(again)
    again.loader.exec_module(third)
    for copy in {*sys.modules} - before - {"copied"}:
        if copy.startswith("copied."):
            del sys.modules[copy]
    assert len({module.NAMESPACE for module in (first, second, third)}) == 3
