"""Proof in environments of their own: the converted demo model generates there, and refuses to load without trust.

python tests/clean_demo.py make FOLDER                 in the environment of linearize: FOLDER/demo
python tests/clean_demo.py check FOLDER PYTHON ...     as in clean_env.py, which compares its logits
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

NAME = "demo"


def make(folder: Path) -> None:
    """Convert the model that the package ships, in float32, and note the logits to expect."""
    import torch
    import transformers
    from clean_env import lay_out

    from linearize.convert import convert, plan_conversion
    from linearize.demo import model_folder

    with tempfile.TemporaryDirectory() as scratch:
        source, converted = Path(scratch) / "source", Path(scratch) / NAME
        transformers.AutoModelForCausalLM.from_pretrained(model_folder(), dtype=torch.float32).save_pretrained(source)
        transformers.AutoTokenizer.from_pretrained(model_folder()).save_pretrained(source)
        convert(*plan_conversion(str(source), "gsa"), converted, level="none")
        lay_out(folder / NAME, source, converted)


def load(folder: Path) -> None:
    """Inside the clean environment: generate, and compare the logits of the steps with those of one pass."""
    import torch
    import transformers

    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    refusal = ""
    try:
        transformers.AutoModelForCausalLM.from_pretrained(folder / NAME)
    except ValueError as error:
        refusal = str(error)
    assert "trust_remote_code" in refusal, refusal or "loads without trust_remote_code"
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder / NAME)
    options = {"trust_remote_code": True, "dtype": torch.float32}
    model = transformers.AutoModelForCausalLM.from_pretrained(folder / NAME, **options)
    prompt = tokenizer("import os\n", return_tensors="pt")
    out = model.generate(**prompt, max_new_tokens=16, do_sample=True, output_logits=True, return_dict_in_generate=True)
    with torch.no_grad():
        whole = model(out.sequences[:, :-1], use_cache=False).logits[:, prompt["input_ids"].shape[1] - 1 :]
    torch.testing.assert_close(torch.stack(out.logits, 1), whole, atol=1e-3, rtol=1e-4)
    print(f"{NAME}: refuses without trust, generates {len(out.logits)} tokens, transformers {transformers.__version__}")


if __name__ == "__main__":
    verb, place, *interpreters = sys.argv[1:]
    if verb == "check":
        from clean_env import check

        check(Path(place), interpreters, __file__)
    else:
        {"make": make, "load": load}[verb](Path(place))
