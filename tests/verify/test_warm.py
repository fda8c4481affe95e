"""The forks that stand for clean processes in the tests (tests/warm.py) see and report what new processes do."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import pytest
import warm

from linearize.errors import Exit, LinearizeError
from linearize.verify import reload

# What a script can see of its process, except for the modules that are imported already.
LOOK = """
import importlib.util, os, tempfile
from transformers import dynamic_module_utils
import linearize_child.inputs
print(json.dumps({
    "arguments": sys.argv,
    "path": sys.path,
    "environment": dict(os.environ),
    "folder": os.getcwd(),
    "input": sys.stdin.read(),
    "found": [name for name in ("linearize", "linearize_kernels", "triton", "peft") if importlib.util.find_spec(name)],
    "ours": sorted(name for name in sys.modules if name.startswith("linearize")),
    "cache": dynamic_module_utils.HF_MODULES_CACHE,
    "child": linearize_child.inputs.__file__,
    "scratch": tempfile.gettempdir(),
    "threads": torch.get_num_threads(),
    "isolated": sys.flags.isolated,
    "name": __name__,
}))
"""


@pytest.mark.parametrize("refused", [reload.REFUSED, ()], ids=str)
def test_a_fork_sees_what_a_process_sees(
    refused: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    seen: list[dict[str, Any]] = []
    with reload.clean_command(LOOK, ["one", "two words"], refused) as command:
        for package in (warm.SUBPROCESS, subprocess):
            monkeypatch.setattr(reload, "subprocess", package)
            with reload.started(*command) as child:
                assert isinstance(child, warm.Child) == (package is warm.SUBPROCESS)
                seen.append(reload.result_of(child))
    assert seen[0] == seen[1]
    assert bool(seen[0]["found"]) == (not refused)
    assert seen[0]["ours"] == ["linearize_child", "linearize_child.inputs"]


@pytest.mark.parametrize(
    ("script", "words", "code"),
    [
        ("import os; os.kill(os.getpid(), 9)", "cannot load it:.*ended by signal 9", Exit.CHECK_FAILED),
        ("print('loaded'); sys.exit(3)", "loads it and then fails", Exit.CHECK_FAILED),
        ("raise OSError(28, 'No space left on device')", "no space left on the disk", Exit.RESOURCE),
    ],
)
def test_how_a_fork_ended_is_told(script: str, words: str, code: Exit) -> None:
    with reload.clean_command(script, []) as command, reload.started(*command) as child:
        with pytest.raises(LinearizeError, match=f"(?s){words}") as caught:
            reload.result_of(child)
        assert caught.value.code == code


def test_a_fork_that_is_not_waited_for_is_killed() -> None:
    with reload.clean_command("import time; time.sleep(100)", []) as command, reload.started(*command) as child:
        pass
    assert child.returncode == -9
