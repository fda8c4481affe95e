"""Templates of the code that is written anew for each model, by the version that began to write it so.

`render` fills them in. A template of a released version stays as it is, for folders of that version are recognised by
rendering it again: to change the text, add a template under the present version.
"""

from __future__ import annotations

from typing import NamedTuple


class Templates(NamedTuple):
    """What one version fills in: `modeling` with a `model_class` for each class of the source, `capture` in those whose
    own softmax is intercepted, `bare` in those that ask AutoModel for their bare model; `module` is the file of a
    transformer of diffusers."""

    modeling: str
    model_class: str
    capture: str
    module: str
    bare: str = ""


# Config and models are one file on purpose. transformers keeps remote code by the hash of a file and what it imports,
# and chooses a model class by the config's class: in a file of its own, the config class of two checkpoints would be
# one and the same, and the second checkpoint would run the first one's kernels.
_MODELING_0_1_0 = '''"""{architecture} with linear attention; written by linearize {version}.

The attention modules are the original ones; `seam.py` gives the chosen ones a mixer in place of softmax.
"""

{imports}

{mixer_imports}
from .seam import Linearized, carry_conversions

MECHANISMS = {{{mechanisms}}}


class Linearized{config}({config}):
    """{config} plus `linearize`: which attention modules have which mixer."""

    model_type = "linearized_{model_type}"

    def __init__(self, linearize=None, **kwargs):
        self.linearize = linearize
        super().__init__(**kwargs)

{classes}
carry_conversions({pairs})
'''

_MODEL_CLASS_0_1_0 = """
class Linearized{native}(Linearized, {native}):
    config_class = Linearized{config}
    mechanisms = MECHANISMS
{capture}
"""

_CAPTURE_0_1_0 = "    capture = staticmethod(capture)\n"

# `load` makes modules of the carried text. A bar begins each line of it, for diffusers looks for imports in whatever
# begins a line with `from`, in strings too.
_MODULE_0_1_0 = '''"""{native} with linear attention; written by linearize {version}.

FILES are files of linearize's kernels folder, a bar before each line; `load` makes modules of them.
"""

import importlib.abc
import importlib.util
import os
import sys
import types

from diffusers import {native}
{imports}
NAME = "{name}"
MECHANISMS = {mechanisms}
READERS = {{{readers}}}
FILES = {{}}  # name -> text, in the order of their imports


class Carried(importlib.abc.ExecutionLoader):
    """Loads a module from FILES; tracebacks, inspect and Triton find its text."""

    def get_source(self, fullname):
        lines = FILES[fullname.rpartition(".")[2]].strip("\\n").split("\\n")
        return "".join(line[2:] + "\\n" for line in lines)

    def get_filename(self, fullname):
        return os.path.join(os.path.dirname(os.path.abspath(__file__)), *fullname.split(".")) + ".py"


def load():
    """The class, made once in a process."""
    package = sys.modules.get(NAME)
    if not hasattr(package, "Linearized{native}"):
        package = types.ModuleType(NAME)
        package.__path__ = []
        sys.modules[NAME] = package
        for file in FILES:
            spec = importlib.util.spec_from_loader(f"{{NAME}}.{{file}}", Carried())
            module = importlib.util.module_from_spec(spec)
            sys.modules[spec.name] = module
            spec.loader.exec_module(module)
            setattr(package, file, module)
        mixers = {{name: package.mixer.own_mixer(getattr(package, name)) for name in MECHANISMS}}
        linearized = package.diffusion.linearized
        package.Linearized{native} = linearized({native}, mixers, READERS, __file__)
    return package.Linearized{native}


{files}

Linearized{native} = load()
'''

# The name of the weights in config.json: transformers refuses one with another suffix, and puts it into its message.
# Without it LlamaForCausalLM.from_pretrained(folder) would load the source's weights, and run softmax.
REFUSAL = "none for this class, which would leave out the linear layers: use an Auto class and trust_remote_code=True"

_INIT_0_1_0 = """    def __init__(self, linearize=None, **kwargs):
        self.linearize = linearize
        super().__init__(**kwargs)
"""
_INIT_0_2_0 = f"""    def __init__(self, linearize=None, transformers_weights=None, **kwargs):
        self.linearize = linearize
        super().__init__(**kwargs)

    def to_dict(self):
        # With a name of the weights that the classes of transformers refuse: they would run softmax.
        return {{{{**super().to_dict(), "transformers_weights": "{REFUSAL}"}}}}
"""
_MODELING_0_2_0 = _MODELING_0_1_0.replace(_INIT_0_1_0, _INIT_0_2_0)

# From here on a converted model keeps its source's type. AutoTokenizer reads the config first, and of a type that
# it does not know it asks whether to run code. The classes that transformers has for the type refuse the weights.
_TYPE_0_2_0 = """
    model_type = "linearized_{model_type}"
"""
_PAIRS_0_3_0 = '(("{model_type}", "{model_type}"), {class_pairs})'
_MODELING_0_3_0 = _MODELING_0_2_0.replace(_TYPE_0_2_0, "").replace("({pairs})", _PAIRS_0_3_0)
# Its first folders have the file under the name that it had before.
_MODELING_0_3_0 = _MODELING_0_3_0.replace("`seam.py` gives", "`{hooks}.py` gives").replace(
    ".seam import", ".{hooks} import"
)

TEMPLATES = {
    "0.1.0": Templates(_MODELING_0_1_0, _MODEL_CLASS_0_1_0, _CAPTURE_0_1_0, _MODULE_0_1_0),
    "0.2.0": Templates(_MODELING_0_2_0, _MODEL_CLASS_0_1_0, _CAPTURE_0_1_0, _MODULE_0_1_0),
    "0.3.0": Templates(_MODELING_0_3_0, _MODEL_CLASS_0_1_0, _CAPTURE_0_1_0, _MODULE_0_1_0, "    bare = {bare}\n"),
}


DEVELOPED = ".dev0"  # follows a version's number: states of it that wrote folders before the present one


def written(version: str) -> str:
    """A version as files of it have it written in them: those of all its states the same."""
    return version.removesuffix(DEVELOPED)


def number(version: str) -> tuple[int, ...]:
    """A version as numbers, which sort as versions do: 0.9.0 before 0.10.0."""
    return tuple(int(part) for part in written(version).split("."))


def templates_of(version: str) -> Templates:
    """Those of `version`: the newest that are not newer than it."""
    return TEMPLATES[max((known for known in TEMPLATES if number(known) <= number(version)), key=number)]
