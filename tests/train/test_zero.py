"""DeepSpeed ZeRO-3, the `deepspeed` extra: two gloo processes against one. Without deepspeed, how it is refused."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from test_processes import FINETUNE, STEPS, assert_same_run, model, one, recipe_in  # noqa: F401 (fixtures)
from training import AT, base, make_recipe, metrics, stage, train, write_recipe

from linearize.errors import Exit, LinearizeError
from linearize.train.deepspeed_zero3 import read_config

ZERO = {"ACCELERATE_USE_DEEPSPEED": "true", "ACCELERATE_DEEPSPEED_ZERO_STAGE": "3"}
needs_deepspeed = pytest.mark.skipif(
    importlib.util.find_spec("deepspeed") is None, reason="needs deepspeed: pip install 'linearize[deepspeed]'"
)


# Else two whole copies would pass for shards.
PEEK = """
from linearize.train.session import Finetuner
plain = Finetuner.save
def save(self, *rest):
    held = [p.numel() for p in self.model.parameters() if hasattr(p, "ds_shape")]
    assert held and not any(held), held
    plain(self, *rest)
Finetuner.save = save
"""


def launch(*arguments: Any, **environment: str) -> subprocess.CompletedProcess[str]:
    """Two processes of a script or a module, as a launcher of torch starts them; accelerate's sets the same."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    command += map(str, arguments)
    return subprocess.run(command, capture_output=True, text=True, env={**os.environ, **environment}, timeout=300)


@needs_deepspeed
def test_zero_trains_what_one_process_does_and_resumes(model: Path, one: Path, tmp_path: Path) -> None:  # noqa: F811
    """Told to end while the source's weights train, so their optimizer's state goes through the checkpoint."""
    script = tmp_path / "at.py"
    script.write_text(PEEK + AT)
    recipe = recipe_in(tmp_path, model, 1, 2)
    stopped = launch(script, "SIGTERM", "step", 2 * STEPS + 1, recipe, **ZERO)
    assert f"exitcode  : {Exit.INTERRUPTED:d}" in stopped.stderr, stopped.stderr[-3000:]
    assert (metrics(tmp_path, "stage")[-1], metrics(tmp_path, "step")[-1]) == ("logit_kl", 2)
    done = launch(*FINETUNE, recipe, **ZERO)
    assert done.returncode == 0, done.stderr[-3000:]
    assert_same_run(tmp_path, one)


@needs_deepspeed
def test_zero_in_mixed_precision(model: Path, tmp_path: Path) -> None:  # noqa: F811
    """bf16 where frozen, float32 masters where trained; the next step sees what the optimizer wrote."""
    folder = base(model.parent.parent, "llama", "bfloat16")
    shared = {"steps": 2, "optimizer": {"lr": 1e-3}}
    both = [stage("attention_transfer", **shared), stage("sft", ["new", "mixer"], **shared)]
    runtime = {"device": "cpu", "precision": "bf16", "gradient_checkpointing": True}
    train(make_recipe(tmp_path / "one", folder, *both, runtime=runtime))
    both = [{**each, "batch": {"per_device": 1}} for each in both]
    done = launch(*FINETUNE, write_recipe(tmp_path / "two", folder, *both, runtime=runtime), **ZERO)
    assert done.returncode == 0, done.stderr[-3000:]
    assert metrics(tmp_path / "two") == pytest.approx(metrics(tmp_path / "one"), rel=1e-3)


Z3: dict[str, Any] = {"stage": 3}
CONFIGS: list[tuple[Any, str]] = [
    ("{", "config cannot be used"),
    ({}, "ZeRO optimization config"),
    ({"zero_optimization": {**Z3, "nonsense": 1}}, "nonsense"),
    ({"zero_optimization": {**Z3, "zero_quantized_weights": True}}, "zero_quantized_weights"),
    ({"zero_optimization": {**Z3, "mics_shard_size": 2}}, "mics_shard_size"),
    ({"zero_optimization": Z3, "gradient_clipping": 0.5}, "gradient_clipping.*max_grad_norm"),
    ({"zero_optimization": Z3, "gradient_accumulation_steps": 3}, "stages.batch.gradient_accumulation_steps"),
    ({"zero_optimization": Z3, "fp16": {"enabled": True}}, "fp16.*runtime.precision"),
    ({"zero_optimization": Z3, "optimizer": {"type": "AdamW"}}, "optimizer"),
]


@needs_deepspeed
def test_a_config_file_says_what_the_recipe_says_or_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = make_recipe(tmp_path, tmp_path, stage("logit_kl"), runtime={"device": "cpu"})
    own = recipe.stages[0]
    monkeypatch.setenv("ACCELERATE_USE_DEEPSPEED", "true")
    monkeypatch.setenv("ACCELERATE_DEEPSPEED_CONFIG_FILE", str(tmp_path / "ds.json"))
    same = {"gradient_clipping": own.optimizer.max_grad_norm, "train_micro_batch_size_per_gpu": own.batch.per_device}
    left = {"train_batch_size": "auto", "optimizer": "auto", "bf16": {"enabled": "auto"}}
    plain = {"stage": "3", "offload_param": None, "zero_hpz_partition_size": 1, "overlap_comm": "auto"}
    (tmp_path / "ds.json").write_text(json.dumps({"zero_optimization": plain, **same, **left}))
    assert read_config(recipe, "no") is not None
    for given, message in CONFIGS:
        (tmp_path / "ds.json").write_text(given if isinstance(given, str) else json.dumps(given))
        with pytest.raises(LinearizeError, match=message) as caught:
            read_config(recipe, "no")
        assert caught.value.code == Exit.INCOMPATIBLE


REFUSED = [
    ({"ACCELERATE_DEEPSPEED_ZERO_STAGE": "2"}, {}, r"--zero_stage.*3.*--use_fsdp.*--fsdp_version.*2"),
    ({"ACCELERATE_DEEPSPEED_OFFLOAD_PARAM_DEVICE": "cpu"}, {}, "--offload_param_device none"),
    ({}, {"compile": True}, "runtime.compile: false"),
]


@needs_deepspeed
@pytest.mark.parametrize(("environment", "runtime", "message"), REFUSED, ids=str)
def test_zero_settings_that_are_refused(
    environment: dict[str, str], runtime: dict[str, Any], message: str, model: Path, tmp_path: Path,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    for name, value in {**ZERO, **environment}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(LinearizeError, match=message) as caught:
        train(make_recipe(tmp_path, model, stage("logit_kl"), runtime={"device": "cpu", **runtime}))
    assert caught.value.code == Exit.INCOMPATIBLE
    assert not (tmp_path / "run").exists()


def test_deepspeed_that_is_not_installed(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: F811
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *rest: None if name == "deepspeed" else find(name, *rest)
    )
    for name, value in ZERO.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(LinearizeError, match=r"linearize\[deepspeed\].*--use_fsdp --fsdp_version 2") as caught:
        train(make_recipe(tmp_path, model, stage("logit_kl")))
    assert caught.value.code == Exit.RESOURCE
    assert not (tmp_path / "run").exists()
