"""Students whose weights torchao or bitsandbytes quantizes while they are loaded: close to themselves in float32."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, TorchAoConfig

import linearize.demo
from linearize.convert import convert, plan_conversion

DEMO = Path(linearize.demo.__file__).parent / "model"
# bitsandbytes packs only multiples of 64 on a CPU; the demo's MLP has 416 channels.
MLP = ["lm_head", "gate_proj", "up_proj", "down_proj"]


@pytest.fixture(scope="module")
def student(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("quantized") / "student"
    convert(*plan_conversion(str(DEMO), "gsa", keep_softmax="4,5"), folder, level="none", say=lambda line: None)
    return folder


def torchao() -> Any:
    kinds = pytest.importorskip("torchao.quantization")
    return TorchAoConfig(kinds.Int8WeightOnlyConfig())


def nf4() -> Any:
    pytest.importorskip("bitsandbytes")
    return BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.float32, llm_int8_skip_modules=MLP
    )


def int8() -> Any:
    pytest.importorskip("bitsandbytes")
    return BitsAndBytesConfig(load_in_8bit=True)


# The largest KL to the float model that is allowed.
METHODS = {"torchao int8": (torchao, 1e-3), "nf4": (nf4, 5e-2), "bitsandbytes int8": (int8, 5e-3)}


@pytest.mark.parametrize("method", METHODS)
def test_a_quantized_student_answers_as_itself(student: Path, tmp_path: Path, method: str) -> None:
    make, allowed = METHODS[method]
    config, ids = make(), torch.arange(5, 205)[None]

    def load(folder: Path, **settings: Any) -> Any:
        return AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True, **settings).eval()

    def answers(model: Any) -> torch.Tensor:
        with torch.no_grad():
            return model(ids).logits.float().log_softmax(-1)

    wanted = answers(load(student, dtype=torch.float32))
    model = load(student, dtype=torch.float32, quantization_config=config)
    model.save_pretrained(tmp_path)  # before it computes: on a CPU bitsandbytes then repacks its weights
    kinds = {type(p).__name__ for name, p in model.named_parameters() if "mixer" in name}
    # bitsandbytes leaves out modules that have parameters in float32, as gates have.
    assert bool(kinds - {"Parameter"}) == method.startswith("torchao")
    found = answers(model)
    kl = float((wanted.exp() * (wanted - found)).sum(-1).mean())
    assert 0 < kl < allowed
    assert model.generate(ids, max_new_tokens=4, do_sample=False).shape == (1, 204)
    assert float((answers(load(tmp_path)) - found).abs().max()) < 1e-3
