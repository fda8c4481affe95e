"""`linearize mechanisms`, `generate` and `doctor`."""

from __future__ import annotations

import importlib.metadata
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from conftest import Command, holds
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from training import EOS, TEMPLATE, base, byte_tokenizer
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

from linearize.demo import model_folder
from linearize.errors import Exit
from linearize.measure.generate import Sampling, generate, load
from linearize.plan.mechanisms import load_mechanism, mechanism_names
from linearize_kernels.mixer import option_types

# ---------------------------------------------------------------- mechanisms


def test_mechanisms_are_those_of_the_folder(linearize: Command) -> None:
    code, out, _ = linearize("mechanisms", "--json")
    assert code == 0
    assert [one["name"] for one in json.loads(out)] == [*mechanism_names()]
    code, out, _ = linearize("mechanisms")
    assert code == 0
    assert all(word in out for word in ("gsa", "Gated slot attention", "2409.07146", "causal", "torch, triton"))


@pytest.mark.parametrize("name", mechanism_names())
def test_a_mechanism_tells_all_that_its_file_says(linearize: Command, name: str) -> None:
    code, out, _ = linearize("mechanisms", name, "--json")
    assert code == 0
    told, mixer = json.loads(out), load_mechanism(name)
    assert {option["name"]: option["default"] for option in told["options"]} == {
        option: default for option, (_, _, default) in option_types(mixer).items()
    }
    assert {o["name"]: o["published"] for o in told["options"] if o["name"] in mixer.published} == mixer.published
    assert all({"choices", "low"} & option.keys() or option["type"] == "bool" for option in told["options"])
    for message in ("title", "paper", "causal", "bidirectional", "state_formula"):
        assert told[message] == getattr(mixer, message)
    assert (told["example"]["new_parameters"] > 0) == (name != "window")
    code, out, _ = linearize("mechanisms", name)
    assert all(option["name"] in out for option in told["options"])
    assert [option["name"] for option in told["options"] if not option["about"]] == []
    assert "\n" not in told["about"].replace("\n\n", "")  # a terminal has its own width
    assert "ValueError" not in out  # options are set by people who call no constructor
    published = any(option["published"] != option["default"] for option in told["options"])
    assert ("faithful=true" in out) == published
    assert mixer.state_formula in " ".join(out.split())


def test_demo_names_the_model_that_is_shipped(linearize: Command, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.chdir(tmp_path)
    code, out, _ = linearize("inspect", "demo", "--json")
    assert (code, json.loads(out)["source"]) == (0, "demo")
    code, out, err = linearize("convert", "demo", "--to", "la", "--dry-run")
    assert code == 0
    assert "demo (LlamaForCausalLM" in err
    code, out, _ = linearize("generate", "demo", "def ", "--max-new-tokens", 2)
    assert code == 0
    assert out.strip()
    code, _, err = linearize("inspect", "./demo")  # a folder of that name
    assert code != 0
    assert "./demo" in err


def test_the_folder_of_a_run_names_its_model(linearize: Command, tmp_path: Path) -> None:
    (tmp_path / "final").mkdir()
    (tmp_path / "final" / "config.json").write_text("{}")
    for command in (("generate", tmp_path, "a"), ("verify", tmp_path), ("push", tmp_path, "user/repo")):
        code, _, err = linearize(*command)
        assert code == Exit.INCOMPATIBLE
        assert holds(err, f"{tmp_path / 'final'}")


def test_the_state_formula_of_gsa_is_what_it_computes(linearize: Command) -> None:
    told = json.loads(linearize("mechanisms", "gsa", "--json")[1])
    formula = told["state_formula"].partition(":")[0]
    expression = re.sub(r"(?<=[\w)]) (?=[\w(])", " * ", formula)  # a product is written without a sign
    assert eval(expression, {"E": 8, "M": 64, "D": 64, "Dv": 64}) == told["example"]["state_bytes"]


def test_an_option_under_its_old_name_is_taken_and_the_present_name_told(linearize: Command) -> None:
    ask = ("convert", str(model_folder()), "--dry-run", "--json", "--to")
    code, out, err = linearize(*ask, "gsa", "--set", "gate_heads=query")
    assert code == 0, err
    assert all(step["options"]["state_heads"] == "query" for step in json.loads(out)["plan"]["steps"])
    assert holds(err, "gate_heads", "gsa", "state_heads")
    assert "is called" not in linearize(*ask, "gsa", "--set", "state_heads=query")[2]


def test_an_unknown_mechanism_is_told_the_nearest(linearize: Command) -> None:
    code, out, err = linearize("mechanisms", "gsaa")
    assert (code, out) == (Exit.USAGE, "")
    assert holds(err, "'gsaa'", "'gsa'")


# ---------------------------------------------------------------- generate


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A linearized model with a tokenizer of bytes; its source lies beside it."""
    return base(tmp_path_factory.mktemp("generate"), "llama")


def continued(linearize: Command, model: Path, *options: str | int) -> dict[str, Any]:
    code, out, err = linearize("generate", model, "read ", "--max-new-tokens", "12", "--json", *map(str, options))
    assert code == 0, err
    return json.loads(out)


def test_generation_is_the_models_own(linearize: Command, folder: Path) -> None:
    told = continued(linearize, folder)
    model = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True)
    prompt = load_bytes("read ")
    greedy = model.generate(prompt, max_new_tokens=12, do_sample=False)[0, prompt.shape[1] :].tolist()
    assert told["tokens"] == greedy
    assert len(greedy) == 12 or greedy[-1] == EOS
    assert told["prompt_tokens"] == 5
    assert told["tokens_per_s"] > 0
    assert not told["softmax"]


def load_bytes(text: str) -> torch.Tensor:
    return byte_tokenizer()(text, return_tensors="pt")["input_ids"]


def test_a_message_is_asked_by_the_template_and_the_answer_alone_is_printed(linearize: Command, folder: Path) -> None:
    told = continued(linearize, folder, "--chat")
    assert told["tokens"] == continued_tokens(linearize, folder, "u:read \na:")
    code, out, _ = linearize("generate", folder, "read ", "--max-new-tokens", "12", "--chat")
    assert (code, out) == (0, told["text"] + "\n")


def continued_tokens(linearize: Command, folder: Path, prompt: str) -> list[int]:
    _, out, _ = linearize("generate", folder, prompt, "--max-new-tokens", "12", "--json")
    return json.loads(out)["tokens"]


def test_an_answer_ends_where_the_template_ends_a_turn(folder: Path, linearize: Command, tmp_path: Path) -> None:
    """Also where no setting of the model names that token."""
    written = continued(linearize, folder, "--chat")["tokens"]
    end = byte_tokenizer().convert_ids_to_tokens(written[3])
    shutil.copytree(folder, tmp_path / "chat")
    tokenizer = byte_tokenizer()
    tokenizer.add_special_tokens({"extra_special_tokens": [end]})
    tokenizer.chat_template = TEMPLATE.replace(
        "{{ m.content }}\n", "{{ m.content }}{{ '" + end + "' if m.role[0] == 'a' else '\n' }}"
    )
    tokenizer.save_pretrained(tmp_path / "chat")
    assert continued(linearize, tmp_path / "chat", "--chat")["tokens"] == written[: written.index(written[3]) + 1]


def test_chat_needs_a_template(folder: Path, linearize: Command, tmp_path: Path) -> None:
    shutil.copytree(folder, tmp_path / "plain")
    (tmp_path / "plain" / "chat_template.jinja").unlink()
    code, out, err = linearize("generate", tmp_path / "plain", "x", "--chat")
    assert (code, out) == (Exit.INCOMPATIBLE, "")
    assert holds(err, "--chat", "chat_template.jinja")
    code, out, err = linearize("generate", folder, "", "--chat")
    assert (code, out, holds(err, "empty")) == (Exit.USAGE, "", True)


def test_a_model_saved_again_is_known(linearize: Command, folder: Path, tmp_path: Path) -> None:
    """save_pretrained writes no linearize.json; the config tells."""
    again = tmp_path / "again"
    AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True).save_pretrained(again)
    byte_tokenizer().save_pretrained(again)
    assert continued(linearize, again)["tokens"] == continued(linearize, folder)["tokens"]
    assert continued(linearize, again, "--teacher")["softmax"]
    code, _, err = linearize("upgrade", again)
    assert code == Exit.INCOMPATIBLE
    assert holds(err, "linearize.json")
    (again / "mixer.py").write_text("raise SystemExit('ran')")
    code, _, err = linearize("generate", again, "x")
    assert code == Exit.INCOMPATIBLE
    assert "mixer.py" in err


def test_the_teacher_writes_what_the_source_writes(linearize: Command, folder: Path) -> None:
    """At a temperature, so that the texts of these untrained models are not one letter."""
    style = ("--temperature", "1.0", "--seed", "3")
    source = continued(linearize, folder.parent / "source", *style)
    teacher = continued(linearize, folder, "--teacher", *style)
    assert source["softmax"]
    assert teacher["softmax"]
    assert teacher["tokens"] == source["tokens"] != continued(linearize, folder, *style)["tokens"]
    code, _, err = linearize("generate", folder.parent / "source", "x", "--teacher")
    assert code == Exit.USAGE
    assert "is not linearized" in err


def test_sampling_follows_its_options(linearize: Command, folder: Path) -> None:
    def sampled(*options: str | int) -> list[int]:
        return continued(linearize, folder, *options)["tokens"]

    assert sampled("--temperature", 1, "--seed", 1) == sampled("--temperature", 1, "--seed", 1)
    assert sampled("--temperature", 1, "--seed", 1) != sampled("--temperature", 1, "--seed", 2)
    assert sampled("--temperature", 1, "--seed", 1, "--top-p", 0.001) == sampled()
    assert sampled("--temperature", 0, "--seed", 1) == sampled()
    assert sampled("--temperature", 1e-6, "--seed", 1) == sampled()


def test_text_is_streamed(linearize: Command) -> None:
    """The shipped model, for it writes words."""
    loaded = load(str(model_folder()), None, device="cpu", dtype="keep", teacher=False, trust_remote_code=False)
    pieces: list[str] = []
    result = generate(loaded, "def read", Sampling(20, 0.8, 1.0, 5), pieces.append)
    assert len([piece for piece in pieces if piece]) > 3
    assert "".join(pieces) == result["prompt"] + result["text"]
    assert result["prompt"] == "def read"
    style = ("--max-new-tokens", "20", "--temperature", "0.8", "--seed", "5")
    code, out, err = linearize("generate", model_folder(), "def read", *style)
    assert code == 0
    assert out == "def read" + result["text"] + "\n"
    assert err.startswith(f"{len(result['tokens'])} tokens, ")


@pytest.mark.parametrize("prompt", ["a b", "b a b a b a b a b a b a b", "a"])
def test_the_first_word_keeps_its_space(folder: Path, prompt: str) -> None:
    """SentencePiece decodes a space before a word only where it is not the first one."""
    vocabulary = {"<unk>": 0, "▁a": 1, "▁b": 2} | {f"▁w{n}": n for n in range(3, 257)}
    cutter = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    cutter.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always")
    cutter.decoder = decoders.Metaspace(prepend_scheme="always")
    loaded = load(str(folder), None, device="cpu", dtype="keep", teacher=False, trust_remote_code=False)
    loaded = loaded._replace(tokenizer=PreTrainedTokenizerFast(tokenizer_object=cutter))
    pieces: list[str] = []
    result = generate(loaded, prompt, Sampling(5, 0.0, 1.0, 0), pieces.append)
    assert result["text"].startswith(" ")
    assert "".join(pieces) == prompt + result["text"]
    assert len(result["text"].split()) == len(result["tokens"])


def test_weights_go_where_and_how_they_should(folder: Path) -> None:
    for name, expected in (("keep", torch.float32), ("bfloat16", torch.bfloat16)):
        loaded = load(str(folder), None, device="auto", dtype=name, teacher=False, trust_remote_code=False)
        assert loaded.model.dtype == expected
        assert loaded.model.device.type == ("cuda" if torch.cuda.is_available() else "cpu")


@pytest.mark.parametrize(
    ("options", "expected", "message"),
    [
        (["--dtype", "bfloat"], Exit.USAGE, ("'bfloat16'",)),
        (["--device", "gpu"], Exit.USAGE, ("choose", "cuda")),
        (["--max-new-tokens", "0"], Exit.USAGE, ("--max-new-tokens",)),
        (["--temperature", "-1"], Exit.USAGE, ("--temperature",)),
        (["--top-p", "1.5"], Exit.USAGE, ("--top-p",)),
        (["--top-p", "nan"], Exit.USAGE, ("--top-p",)),
        (["--top-p", "0.9"], Exit.USAGE, ("--top-p", "0.9", "--temperature", "0")),
        (["--revision", "main"], Exit.USAGE, ("revision", "commit")),
        (["--temperature", "1e-40"], Exit.USAGE, ("--temperature", "1e-40", "0", ">=", "1e-06")),
        (["--temperature", "nan"], Exit.USAGE, ("--temperature",)),
        (["--temperature", "inf"], Exit.USAGE, ("--temperature", "inf", "0")),
        (["--seed", "99999999999999999999"], Exit.USAGE, ("--seed",)),
    ],
)
def test_mistaken_options_are_told(
    linearize: Command, folder: Path, options: list[str], expected: Exit, message: str
) -> None:
    code, out, err = linearize("generate", folder, "x", *options)
    assert (code, out) == (expected, "")
    assert holds(err, *message)


def test_no_more_tokens_than_the_model_takes(linearize: Command, tmp_path: Path) -> None:
    folder = base(tmp_path, "gpt2")
    assert continued(linearize, folder, "--max-new-tokens", 252)["prompt_tokens"] == 5
    code, out, err = linearize("generate", folder, "read ", "--max-new-tokens", "253")
    assert (code, out) == (Exit.USAGE, "")
    assert holds(err, "256", "5", "--max-new-tokens", "252")
    code, _, err = linearize("generate", folder, "read " * 52)
    assert code == Exit.USAGE
    assert holds(err, "260")


def test_one_text_is_written_whatever_the_models_own_settings(linearize: Command, folder: Path, tmp_path: Path) -> None:
    shutil.copytree(folder, other := tmp_path / "beams")
    settings = json.loads((other / "generation_config.json").read_text())
    (other / "generation_config.json").write_text(json.dumps({**settings, "num_beams": 4, "num_return_sequences": 2}))
    for options in ((), ("--temperature", 1)):
        assert continued(linearize, other, *options)["tokens"] == continued(linearize, folder, *options)["tokens"]


def test_the_bounds_of_sampling_can_be_used(linearize: Command, folder: Path) -> None:
    continued(linearize, folder, "--temperature", "1e-6", "--seed", str(2**64 - 1), "--top-p", "0")


def test_running_out_of_memory_is_told(linearize: Command, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for error, message in (
        (torch.cuda.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB"), "CUDA out of memory"),
        (RuntimeError("CUDA error: out of memory"), "CUDA out of memory"),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling cublasCreate"), "CUDA out of memory"),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to"), "out of memory"),
    ):

        def full(*arguments: Any, error: Exception = error, **options: Any) -> None:
            raise error

        with monkeypatch.context() as patch:
            patch.setattr("transformers.generation.GenerationMixin.generate", full)
            wanted = (Exit.RESOURCE, "", f"error: {message}. Try --dtype bfloat16, or --device cpu\n")
            assert linearize("generate", folder, "x") == wanted
            patch.setattr("linearize.convert.plan_conversion", full)
            assert linearize("convert", folder, "--to", "gsa") == (Exit.RESOURCE, "", f"error: {message}\n")
            patch.setattr("torch.nn.Module.to", full)
            assert linearize("generate", folder, "x")[0] == Exit.RESOURCE


@pytest.mark.parametrize("kind", ["linear", "source", "pickled"])
def test_damaged_weights_are_told(linearize: Command, folder: Path, tmp_path: Path, kind: str) -> None:
    model = Path(shutil.copytree(folder if kind == "linear" else folder.parent / "source", tmp_path / "model"))
    shard = max(model.glob("*.safetensors"))
    if kind == "pickled":
        shard.unlink()
        shard = model / "pytorch_model.bin"
        torch.save({}, shard)
    data = shard.read_bytes()
    shard.unlink()  # it may be a link to the shared one
    shard.write_bytes(data[:-9])
    code, out, err = linearize("generate", model, "x")
    assert (code, out) == (Exit.INCOMPATIBLE, "")
    assert ("not a plain pickle" if kind == "pickled" else "is damaged or cut short: tensor") in err
    assert shard.name in err


@pytest.mark.parametrize("kind", ["linear", "source"])
def test_missing_weights_are_told_and_never_random(linearize: Command, folder: Path, tmp_path: Path, kind: str) -> None:
    model = Path(shutil.copytree(folder if kind == "linear" else folder.parent / "source", tmp_path / "model"))
    shard = max(model.glob("*.safetensors"), key=lambda file: "mixers" not in file.name)
    tensors = load_file(shard)
    lost = next(name for name in sorted(tensors) if "mlp" in name)
    del tensors[lost]
    shard.unlink()  # it may be a link to the shared one
    save_file(tensors, shard, {"format": "pt"})
    for index in model.glob("*.index.json"):
        listed = json.loads(index.read_text())
        del listed["weight_map"][lost]
        index.write_text(json.dumps(listed))
    code, out, err = linearize("generate", model, "x")
    assert (code, out) == (Exit.INCOMPATIBLE, "")
    assert holds(err, f"{'Linearized' if kind == 'linear' else ''}LlamaForCausalLM", f"{lost}")


def test_what_cannot_generate_is_told(
    linearize: Command, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    code, _, err = linearize("generate", folder, "")
    assert code == Exit.USAGE
    assert holds(err, "prompt", "token")
    code, _, err = linearize("generate", folder, "a\udcff")
    assert code == Exit.USAGE
    assert holds(err, "UTF-8", "2")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    code, _, err = linearize("generate", folder, "x", "--device", "cuda")
    assert code == Exit.RESOURCE
    assert "no CUDA device" in err
    shutil.copytree(folder, tmp_path / "bare")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / "bare" / name).unlink()
    code, _, err = linearize("generate", tmp_path / "bare", "x")
    assert code == Exit.INCOMPATIBLE
    assert "no tokenizer" in err
    assert err.endswith("Copy the source's tokenizer files there\n")


def test_other_code_runs_only_when_trusted(linearize: Command, folder: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    shutil.copytree(folder, other)
    mixer = other / "mixer.py"
    mixer.write_text(mixer.read_text() + f"\nfrom pathlib import Path\nPath({str(tmp_path / 'ran')!r}).touch()\n")
    code, out, err = linearize("generate", other, "x")
    assert (code, out) == (Exit.INCOMPATIBLE, "")
    assert "mixer.py" in err
    assert "--trust-remote-code" in err
    assert not (tmp_path / "ran").exists()
    assert linearize("generate", other, "x", "--trust-remote-code", "--max-new-tokens", "1")[0] == 0
    assert (tmp_path / "ran").exists()
    adapted = tmp_path / "adapted"  # transformers would load the base that the adapter names
    shutil.copytree(folder, adapted)
    (adapted / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": str(other)}))
    code, _, err = linearize("generate", adapted, "x")
    assert code == Exit.INCOMPATIBLE
    assert "adapter_config.json" in err
    foreign = tmp_path / "foreign"
    shutil.copytree(folder.parent / "source", foreign)
    config = json.loads((foreign / "config.json").read_text())
    (foreign / "config.json").write_text(json.dumps({**config, "auto_map": {"AutoModelForCausalLM": "own.Model"}}))
    code, _, err = linearize("generate", foreign, "x")
    assert code == Exit.INCOMPATIBLE
    assert "--trust-remote-code" in err


def test_a_revision_is_asked_of_the_hub(linearize: Command, monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    from linearize.checkpoint import source

    asked = []
    monkeypatch.setattr(source, "download", lambda *of: asked.append(of) or (folder, "abc"))
    assert linearize("generate", "user/model", "x", "--revision", "abc", "--max-new-tokens", "1")[0] == 0
    assert [(model, revision, weights) for model, revision, _, weights in asked] == [
        ("user/model", "abc", source.weight_files)
    ]


# ---------------------------------------------------------------- doctor


def test_a_doctor_says_that_the_hub_does_not_answer(linearize: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    code, out, _ = linearize("doctor")
    assert code == 0
    (line,) = [line for line in out.splitlines() if "Hub: " in line]
    assert line.split()[0] == "note"
    assert "cannot be reached" in " ".join(out.split())


def test_a_doctor_finds_this_machine_fit(linearize: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    code, out, _ = linearize("doctor", "--json")
    assert code == 0
    found = json.loads(out)
    assert found["missing"] == []
    packages = {package["name"]: package["version"] for package in found["packages"]}
    assert packages["torch"] == importlib.metadata.version("torch")
    assert packages["python"] == sys.version.split()[0]
    assert not {"pytest", "ruff"} & packages.keys()
    assert found["triton"]["used"] == torch.cuda.is_available()
    assert all(free > 0 for free in found["disk"].values())
    assert found["hub"]["token"] is True
    assert found["hub"]["offline"] is True  # as conftest.py has it
    code, text, _ = linearize("doctor")
    assert code == 0
    assert all(word in text for word in ("torch:", "transformers:", "free in", "a token is set", "offline"))
    assert "hf_secret" not in out + text


@pytest.mark.parametrize("servers", [[], ["transformers"], ["vllm", "transformers"]])
def test_a_doctor_says_what_serves(servers: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("linearize.serve.start.is_installed", servers.__contains__)
    from linearize import doctor

    found = doctor.examine()
    assert found["servers"] == servers
    (row,) = [row for row in doctor.rows(found) if row[1].startswith("linearize serve")]
    if servers:
        assert row == ("ok", f"linearize serve: would start the server of {' or '.join(servers)}")
    else:
        assert row[0] == "optional"
        assert f"\n{doctor.with_extra('vllm', found['checkout'])}\n" in row[1]
        assert row[1].endswith('\npip install "transformers[serving]"')


def test_a_doctor_finds_the_cache_where_downloads_go(tmp_path: Path) -> None:
    environment = {**os.environ, "XDG_CACHE_HOME": str(tmp_path)}
    for name in ("HF_HOME", "HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE"):
        environment.pop(name, None)
    code = "import linearize.doctor as d; print(d._cache())"
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert Path(done.stdout.strip()) == tmp_path / "huggingface" / "hub"


def pretend(monkeypatch: pytest.MonkeyPatch, package: str, version: str | None) -> None:
    """As if another version of a package were installed, or none."""
    real: Callable[[str], str] = importlib.metadata.version

    def found(name: str) -> str:
        if name != package:
            return real(name)
        if version is None:
            raise importlib.metadata.PackageNotFoundError(name)
        return version

    monkeypatch.setattr(importlib.metadata, "version", found)


@pytest.mark.parametrize(
    ("package", "version", "message"),
    [
        ("peft", None, 'peft is missing: pip install "peft>='),
        ("transformers", "4.57.0", "transformers 4.57.0 is not "),
    ],
)
def test_what_is_missing_is_exit_4(
    linearize: Command, monkeypatch: pytest.MonkeyPatch, package: str, version: str | None, message: str
) -> None:
    pretend(monkeypatch, package, version)
    code, out, _ = linearize("doctor")
    assert code == Exit.RESOURCE
    assert message in " ".join(out.split())
    code, out, _ = linearize("doctor", "--json")
    assert code == Exit.RESOURCE
    assert [line.startswith(message) for line in json.loads(out)["missing"]] == [True]


def test_sources_that_are_not_installed_are_told(linearize: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> None:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "distribution", missing)
    code, _, err = linearize("doctor")
    assert code == Exit.RESOURCE
    assert holds(err, "install", "-e")


def test_a_missing_extra_is_told_with_its_remedy(linearize: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, "datasets", None)
    monkeypatch.setattr("linearize.doctor.checkout", lambda distribution: None)
    code, out, _ = linearize("doctor")
    assert code == 0
    lines = [line.strip() for line in out.splitlines()]
    assert "optional  extra train (data of the Hub, .zst and .parquet): without datasets:" in lines
    assert 'pip install "linearize[train]"' in lines  # whole, on a line of its own
    pretend(monkeypatch, "peft", None)
    code, out, _ = linearize("doctor")
    assert code == Exit.RESOURCE
    hints = [line.strip() for line in out.splitlines() if "pip install" in line]
    assert all(len(shlex.split(hint)) == 3 and hint.startswith('pip install "') for hint in hints), hints
    assert any(hint.startswith('pip install "peft>=') for hint in hints)


@pytest.mark.parametrize(
    ("about", "line"),
    [
        ("", 'pip install "linearize[train]"'),  # of an index
        ('{"url": "file:///HERE/linearize.whl", "archive_info": {}}', 'pip install "linearize[train]"'),
        ('{"url": "file:///HERE", "dir_info": {}}', 'pip install "linearize[train]"'),
        ('{"url": "file://HERE", "dir_info": {"editable": true}}', 'pip install -e ".[train]"'),
        (
            '{"url": "file:///a%20checkout", "dir_info": {"editable": true}}',
            'pip install -e "/a checkout[train]"',
        ),
    ],
)
def test_an_extra_of_a_checkout_is_installed_as_the_readme_says(
    about: str, line: str, tmp_path: Path, linearize: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    pretend(monkeypatch, "datasets", None)
    monkeypatch.chdir(tmp_path)
    real = importlib.metadata.PathDistribution.read_text

    def read(self: importlib.metadata.PathDistribution, name: str) -> str | None:
        found = about.replace("HERE", str(tmp_path))
        return found if name == "direct_url.json" else real(self, name)

    monkeypatch.setattr(importlib.metadata.PathDistribution, "read_text", read)
    _, out, _ = linearize("doctor")
    assert line in [text.strip() for text in out.splitlines()]
    readme = (Path(__file__).parents[2] / "README.md").read_text("utf-8")
    assert 'pip install -e ".[train]"' in readme


def test_every_extra_that_a_hint_names_is_there() -> None:
    """In messages and pages; the table of the page on installing has them all."""
    root = Path(__file__).parents[2]
    extras = tomllib.loads((root / "pyproject.toml").read_text())["project"]["optional-dependencies"].keys()
    files = [*root.glob("linearize/**/*.py"), *root.glob("docs/*.md"), root / "README.md", root / "CONTRIBUTING.md"]
    found = re.compile(r"pip install[^\n]*?(?:linearize|\.)\[([\w,]+)\]")
    named = {extra for path in files for text in found.findall(path.read_text()) for extra in text.split(",")}
    assert {"train", "onnx", "vllm"} <= named <= extras
    table = (root / "docs/install.md").read_text()
    assert extras == set(re.findall(r"^\| `(\w+)` \|", table, re.MULTILINE))


def test_a_doctor_says_what_each_extra_is_for() -> None:
    from linearize import doctor

    root = Path(__file__).parents[2]
    extras = tomllib.loads((root / "pyproject.toml").read_text())["project"]["optional-dependencies"].keys()
    assert doctor.PURPOSES.keys() == extras - set(doctor.DEVELOPMENT)
    told = [text for _, text in doctor.rows(doctor.examine())]
    assert any(text.startswith("extra company (eval --tasks, TRL, torchao, bitsandbytes): ") for text in told)


def test_a_doctor_works_without_torch() -> None:
    code = "import sys; sys.modules['torch'] = None; from linearize.cli import main; sys.argv[1:] = ['doctor']; main()"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == Exit.RESOURCE, done.stderr
    assert re.search(r"^missing +torch: torch \S+ does not import", done.stdout, re.MULTILINE)


def test_devices_are_told(linearize: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    properties = SimpleNamespace(name="NVIDIA H100", major=9, minor=0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: properties)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda index: (40 << 30, 80 << 30))
    _, out, _ = linearize("doctor")
    assert holds(out, "NVIDIA", "H100", "9.0", "40.0", "GiB", "80.0")
    assert "Triton kernels: used" in out
    pretend(monkeypatch, "triton", None)
    _, out, _ = linearize("doctor")
    assert holds(out, "kernels")
