"""`transformers serve` for a converted model: python -m linearize.serve.with_transformers FOLDER [option ...]

`transformers serve` takes the class of a model from the module `transformers` by its name, and fails for classes that a
folder brings along. So the class is put there first, in this process. Its list of models is that of the Hub's cache:
the folder is not in it, and without a cache the list is an error. So the list names the folder.
"""

from __future__ import annotations

import sys
from unittest import mock

# The module as the server holds it: loading a checkpoint's code may put another into sys.modules.
import transformers
from transformers import AutoConfig
from transformers.dynamic_module_utils import get_class_from_dynamic_module


def register(folder: str) -> type:
    """Put the model class of a converted folder into the module `transformers`, whose code thereby runs."""
    config = AutoConfig.from_pretrained(folder, trust_remote_code=True)
    found: type = get_class_from_dynamic_module(config.auto_map["AutoModelForCausalLM"], folder)
    setattr(transformers, config.architectures[0], found)
    return found


def main(folder: str, options: list[str]) -> None:
    """Register the class of `folder`, then be `transformers serve`."""
    from transformers.cli.serving.model_manager import ModelManager
    from transformers.cli.transformers import app

    register(folder)
    # From 5.24 on a server of one model lists that model.
    models = [{"id": folder, "object": "model", "created": 0, "owned_by": ""}]
    own = hasattr(ModelManager, "get_gen_models")
    with mock.patch.object(ModelManager, "get_gen_models", return_value=models, create=not own):
        app(["serve", folder, "--trust-remote-code", *options], prog_name="transformers")


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
