"""What the config of a converted model says to a server: which layers are linear, and why it may not be served."""

from __future__ import annotations

from typing import Any, NamedTuple

# The operator of vllm_models.py at which vLLM splits graphs, as it does at attention.
OPERATOR = "linearize::state_core"


class Layers(NamedTuple):
    """Attention layers by number: `linear` ones, module path by number, and those that keep `softmax`; and the key
    `heads` of linear ones that keep it."""

    linear: dict[int, str]
    softmax: tuple[int, ...]
    heads: dict[int, tuple[int, ...]]

    @property
    def hybrid(self) -> bool:
        """Whether there is softmax, whose keys need memory."""
        return bool(self.softmax or self.heads)


def is_converted(config: Any) -> bool:
    """Whether a config of transformers is that of a converted model."""
    return bool((getattr(config, "linearize", None) or {}).get("layers"))


def for_engines(layer: dict[str, Any]) -> bool:
    """Whether a layer of a plan is one that engines know as it is, and `linearize export --as` writes for them."""
    return layer["mechanism"] == "mamba2" or bool(layer["options"].get("native"))


def layers_of(config: Any) -> Layers:
    """The layers of a converted decoder, by its config.

    Raises ValueError, naming the model, for one that vLLM cannot run: an encoder, a model with several towers, one
    whose attention modules compute softmax in their own code, one in which heads that keep softmax have sinks, or one
    that vLLM knows by itself.
    """
    sites = [layer["site"] for layer in config.linearize["layers"]]
    name = (getattr(config, "architectures", None) or [type(config).__name__])[0]
    bidirectional = [site["path"] for site in sites if not site["causal"]]
    if bidirectional or getattr(config, "is_encoder_decoder", False):
        where = f" ({bidirectional[0]} is bidirectional)" if bidirectional else ""
        raise ValueError(f"{name} is no causal language model{where}. {_ELSEWHERE}")
    if config.get_text_config() is not config:
        raise ValueError(f"{name} reads more than text, and linearize's plugin serves text models alone. {_ELSEWHERE}")
    own = [site["path"] for site in sites if not site.get("routed", True)]
    if own:
        raise ValueError(
            f"{name}: {own[0]} computes softmax in its own code, which vLLM's Transformers backend cannot replace. "
            f"{_ELSEWHERE}"
        )
    sinks = [site["path"] for site in sites if site.get("softmax_groups") and {"s_aux", "sinks"} & {*site["extras"]}]
    if sinks:
        raise ValueError(
            f"{name}: heads of {sinks[0]} keep softmax (--keep-heads), which has sinks there, and linearize's plugin "
            f"does not hand some heads' sinks to vLLM. {_ELSEWHERE}"
        )
    layers = config.linearize["layers"]
    known = [layer for layer in layers if for_engines(layer)]
    if known:
        what = f"{known[0]['site']['path']} has {known[0]['mechanism']} as vLLM knows it"
        raise ValueError(f"{name}: {what}, without this plugin. Write it so: linearize export DIR --as auto -o OUT")
    linear = {site["layer"]: site["path"] for site in sites}
    heads = {site["layer"]: tuple(site["softmax_groups"]) for site in sites if site.get("softmax_groups")}
    return Layers(linear, tuple(i for i in range(config.num_hidden_layers) if i not in linear), heads)


_ELSEWHERE = "Load it in Python, see its README.md"


def layer_types(config: Any, layers: Layers) -> list[str]:
    """The kind of each layer, as vLLM reads it: `linear_attention`, or what the config says of a kept layer.

    Qwen3 and others write `full_attention` for every layer. vLLM takes such a model for one without states, and then
    reserves no memory for them.
    """
    own = getattr(config, "layer_types", None) or ["full_attention"] * config.num_hidden_layers
    return ["linear_attention" if number in layers.linear else kind for number, kind in enumerate(own)]
