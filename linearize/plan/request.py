"""The request for a conversion, and the plan that follows from it."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from ..checkpoint.source import DTYPES, Source
from ..errors import LinearizeError, check_choice
from ..probe.found import Found
from ..terminal.output import say
from .dropped_features import check_dropped_features
from .keep import LOCAL, KeptWindow, is_auto, keep_heads
from .mechanisms import renamed_options
from .plan import (
    Plan,
    check_rotation,
    check_unused_options,
    choose_layers,
    fitting,
    grouped,
    item_bytes,
    local_steps,
    make_steps,
    resolve_rotation,
)


@dataclasses.dataclass(frozen=True)
class Request:
    """`layers` and `keep_softmax` are as `choose_layers` reads them, or `keep_softmax` is `auto:2`, for which
    `plan_conversion` puts what was chosen, as it does for `keep_heads`, which `heads.keep_heads` reads. With
    `kept_window`, which `KeptWindow` reads, layers keep softmax over so many last tokens and a few first ones alone;
    `plan_conversion` measures which, where it is `auto:4096`, and without a measurement none does. `options` are the
    mechanism's; `allow_drop` consents, by name, to what the linear layers will lack (dropped_features.py); `dtype` is
    the result's, or `keep`.
    `copy` asks for copies of the source's shards, which are hard links otherwise.

    Raises LinearizeError (exit 2) for what is wrong with every model: an unknown mechanism, option or dtype.
    """

    mechanism: str
    layers: str = "all"
    keep_softmax: str = ""
    keep_heads: str = ""
    kept_window: int | str | None = None
    options: dict[str, Any] | None = None
    allow_drop: Sequence[str] = ()
    dtype: str = "keep"
    copy: bool = False

    def __post_init__(self) -> None:
        check_choice("--dtype", self.dtype, ("keep", *DTYPES.values()))
        try:
            window = self.window
        except ValueError as error:
            raise LinearizeError(f"--kept-window {self.kept_window}: {error}") from error
        if window is not None and window.layers and is_auto(self.keep_softmax):
            raise LinearizeError(
                f"--kept-window {self.kept_window} names layers, and --keep-softmax {self.keep_softmax} leaves to "
                f"linearize which are kept. Leave the window to it, too: --kept-window auto:{window.tokens}"
            )
        if window is not None and self.mechanism == LOCAL:
            raise LinearizeError(
                f"--kept-window {self.kept_window}: --to {LOCAL} gives every layer a window. Give some another one: "
                f"--set window@1,3={window.tokens}"
            )
        make_steps([], self.mechanism, self.options or {})

    @property
    def window(self) -> KeptWindow | None:
        """The window of kept layers. Raises ValueError where it is none."""
        return None if self.kept_window is None else KeptWindow.parse(self.kept_window)

    def plan(
        self,
        source: Source,
        found: Found,
        *,
        architecture: str,
        model_type: str,
        stored: str,
        numbers: int,
        pickled: bool,
        scored: bool = False,
        every_window: bool = False,
    ) -> Plan:
        """Decide what becomes of the sites `found` in a source, whose `numbers` parameters are `stored` in that dtype.
        With `scored` the plan is for comparing softmax and mixers on the same q and k, with `every_window` for
        measuring what the window costs in each kept layer.

        Raises LinearizeError: 2 for a choice of layers or a consent that means nothing here, 3 for what does not fit.
        """
        for old, present in renamed_options(self.mechanism, self.options or {}).items():
            say(f"note: the option {old} of {self.mechanism} is called {present} now")
        found = fitting(found, self.mechanism, source.name)
        chosen, kept = choose_layers(found, self.layers, self.keep_softmax, source.name)
        check_dropped_features(chosen, self.allow_drop)
        chosen = keep_heads(self.keep_heads, chosen, found, source.name)
        target = stored if self.dtype == "keep" else self.dtype
        steps = make_steps(chosen, self.mechanism, self.options or {}, item_bytes(target))
        steps = resolve_rotation(found, steps, scored)
        check_rotation(found, steps)
        check_unused_options(found, steps, self.options or {})
        window = self.window
        if window is not None:
            local = local_steps(kept, window, found, item_bytes(target))
            known = {step.site.path: step for step in local if window.limit is None or every_window}
            kept = [site for site in kept if site.path not in known]
            known |= {step.site.path: step for step in steps}
            steps = tuple(known[site.path] for site in found.sites if site.path in known)
        new = sum(step.new_parameters for step in steps)
        cast = target != stored or source.block is not None
        rewritten = numbers if pickled or cast else 0
        source_bytes = source.bytes or numbers * item_bytes(stored)
        return Plan(
            source=source.name,
            revision=source.revision,
            architecture=architecture,
            model_type=model_type,
            dtype=target,
            cast=cast,
            source_dtype=stored,
            pickled=pickled,
            steps=steps,
            kept=tuple(kept),
            others=grouped(found.others),
            reads_masks=found.reads_masks,
            cached_tokens=found.cached_tokens,
            source_bytes=source_bytes,
            needed_bytes=(new + rewritten) * item_bytes(target) + source_bytes * (self.copy and not rewritten),
            copy=self.copy,
        )
