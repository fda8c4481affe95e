"""A checkpoint carries the kernel files that its options use: all of them, and no others."""

from __future__ import annotations

import importlib
import sys
import types
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from models import convert_folder, load, logits, save_source, source_with_mixers, tokens

from linearize import __version__
from linearize.checkpoint.code import code_files, modeling
from linearize.checkpoint.flatten import flat_files, flat_name, kernel_files
from linearize.checkpoint.manifest import read_plan
from linearize.checkpoint.provenance import origin_of
from linearize.convert import convert, plan_conversion
from linearize.errors import LinearizeError
from linearize.plan.mechanisms import (
    build_mixer,
    load_mechanism,
    mechanism_names,
    parts_of,
    present_options,
    resolve_options,
)
from linearize_kernels.mixer import AttentionSite, option_types

# Numbers that switch something on.
NUMBERS = {"window": 4, "taps": 2, "dwc": 3}
T = 16


def site_of(causal: bool, groups: tuple[int, ...] = ()) -> AttentionSite:
    return AttentionSite(0, "attn", "Attention", 32, 4, 2, 8, 8, 0.3, causal, softmax_groups=groups)


def cases(name: str) -> Iterator[tuple[AttentionSite, dict[str, Any]]]:
    """A mechanism at its defaults and with each option set otherwise, for each kind of attention that it knows."""
    mixer = load_mechanism(name)
    for causal in [*([True] * mixer.causal), *([False] * mixer.bidirectional)]:
        for base in mixer.bases or (None,):
            given = {"base": base} if base else {}
            yield site_of(causal), given
            for option, (kind, _, default) in option_types(mixer, base).items():
                values = typing.get_args(kind) or ((False, True) if kind is bool else (NUMBERS.get(option, default),))
                yield from ((site_of(causal), given | {option: value}) for value in values if value != default)
            if causal:
                yield site_of(causal, (1,)), given


def fits(name: str, site: AttentionSite, given: dict[str, Any]) -> bool:
    """Whether these options go together at the site."""
    try:
        build_mixer(name, site, resolve_options(name, given, site))
    except LinearizeError:
        return False
    return True


def groups(name: str) -> dict[tuple[str, ...], list[tuple[AttentionSite, dict[str, Any]]]]:
    """The cases of a mechanism that need the same parts."""
    found: dict[tuple[str, ...], list[tuple[AttentionSite, dict[str, Any]]]] = {}
    for site, given in cases(name):
        if fits(name, site, given):
            parts = parts_of(name, site, resolve_options(name, given, site))
            found.setdefault(tuple(sorted(parts)), []).append((site, given))
    return found


GROUPS = [(name, parts, found) for name in mechanism_names() for parts, found in groups(name).items()]


@pytest.fixture
def package(tmp_path: Path) -> Iterator[str]:
    """The name of a package whose files are those of `tmp_path`, as transformers makes one of a checkpoint."""
    package = types.ModuleType("carried")
    package.__path__ = [str(tmp_path)]
    sys.modules["carried"] = package
    yield "carried"
    for name in [name for name in sys.modules if name.partition(".")[0] == "carried"]:
        del sys.modules[name]


def ids(value: Any) -> str:
    return "" if isinstance(value, list) else value if isinstance(value, str) else "-".join(value)


@pytest.mark.parametrize(("name", "parts", "cases"), GROUPS, ids=ids)
def test_the_files_that_travel_are_those_that_run(
    tmp_path: Path, package: str, name: str, parts: tuple[str, ...], cases: list[tuple[AttentionSite, dict[str, Any]]]
) -> None:
    for file, text in flat_files([name, *parts]).items():
        (tmp_path / file).write_text(text, "utf-8")
    for file in {"window"} & set(parts):  # it enters its name into the mixer's class
        importlib.import_module(f"{package}.{file}")
    mixers = importlib.import_module(f"{package}.mixer")
    kind = mixers.own_mixer(importlib.import_module(f"{package}.{name}"))
    layout = importlib.import_module(f"{package}.layout").TokenLayout
    for site, given in cases:
        options = resolve_options(name, given, site)
        mixer = mixers.mixer_at(kind, mixers.AttentionSite(**vars(site)), options)
        mixer.reset_parameters()
        q, k, v = (torch.randn(1, T, heads, 8) for heads in (4, 2, 2))
        assert mixer(q, k, v, torch.randn(1, T, 32), layout(causal=site.causal))[0].shape == q.shape
        loaded = {module.removeprefix(f"{package}.") for module in sys.modules if module.startswith(f"{package}.")}
        assert {path.stem for path in tmp_path.glob("*.py")} == loaded
        for what, of in parts_of(name, site, options).items():
            assert hasattr(sys.modules[f"{package}.{what}"], of)


def test_options_of_earlier_versions_switch_on_what_they_did() -> None:
    """Under their old names, and with defaults for those that are not there."""
    site = site_of(True)
    assert parts_of("la", site, {"features": "hedgehog"}) == {"features": "Features", "learned_maps": "learned_map"}
    assert present_options("mhla", {"features": "relu"}) == {"feature_map": "relu"}
    assert parts_of("mhla", site, {}) == {"learned_maps": "learned_map"}
    assert parts_of("mhla", site, {"features": "elu"}) == {}
    assert {"gla", "features", "learned_maps"} == parts_of("sla", site, {}).keys()


BASES = {"gla", "gdn", "retnet"}


def carried(folder: Path) -> set[str]:
    return {path.stem for path in folder.glob("*.py")}


def bases_in(folder: Path) -> set[str]:
    return carried(folder) & BASES


def test_a_base_travels_where_a_layer_has_it(tmp_path: Path) -> None:
    """Layers with other options, and what transformers saves of it, have what any layer uses."""
    source = save_source(tmp_path / "source", "llama")
    plan = plan_conversion(str(source), "sla", layers="0-1", options={"base": "gdn"})
    convert(*plan, tmp_path / "one", level="none", say=lambda line: None)
    assert bases_in(tmp_path / "one") == {"gdn"}
    again = plan_conversion(str(tmp_path / "one"), "sla", layers="2", options={"base": "retnet"})
    convert(*again, tmp_path / "two", level="none", say=lambda line: None)
    assert bases_in(tmp_path / "two") == {"gdn", "retnet"}
    assert origin_of(tmp_path / "two", read_plan(tmp_path / "two")).changed == []
    model, ids = load(tmp_path / "two"), tokens(2, 12)
    assert torch.equal(logits(model, ids), logits(source_with_mixers(source, tmp_path / "two"), ids))
    model.save_pretrained(tmp_path / "saved")
    assert carried(tmp_path / "saved") == carried(tmp_path / "two")
    back = plan_conversion(str(tmp_path / "two"), None, restore="0-1")
    convert(*back, tmp_path / "three", level="none", say=lambda line: None)
    assert bases_in(tmp_path / "three") == {"retnet"}


def test_heads_that_keep_softmax_bring_its_file(tmp_path: Path) -> None:
    source = save_source(tmp_path / "source", "llama")
    folder = convert_folder(source, tmp_path / "all")
    assert "softmax_heads" not in carried(folder)
    plan, opened, natives = plan_conversion(str(source), "gsa", options={"slots": 8}, keep_heads="0:0")
    convert(plan, opened, natives, tmp_path / "some", level="none", say=lambda line: None)
    assert "softmax_heads" in carried(tmp_path / "some")
    assert torch.isfinite(logits(load(tmp_path / "some"), tokens(2, 12))).all()


def test_files_of_earlier_states_bring_their_parts_themselves(tmp_path: Path) -> None:
    """They imported the bases at the top of sla.py, and modeling_linearized.py imported none."""
    plan, _, natives = plan_conversion(str(save_source(tmp_path / "source", "llama")), "sla", options={"base": "gdn"})
    files = code_files(plan, natives)
    assert "from .gdn import GatedDeltaNet" in files.pop("modeling_linearized.py")
    earlier = files | {"sla.py": "from .gdn import GatedDeltaNet\n" + files["sla.py"]}
    assert "from .gdn import" not in modeling(__version__, plan, natives, earlier)


def test_a_kept_layer_and_a_window_beside_mechanisms_are_both_imported(tmp_path: Path) -> None:
    """Both are in window.py, and folders of earlier states have both lines."""
    source = str(save_source(tmp_path / "source", "llama"))
    plan, _, natives = plan_conversion(source, "gsa", keep_softmax="1", kept_window=16)
    lines = code_files(plan, natives)["modeling_linearized.py"].splitlines()
    assert [line for line in lines if line.startswith("from .window")] == [
        "from .window import SinkWindow",
        "from .window import Window",
    ]


def test_a_part_that_is_missing_is_told(tmp_path: Path) -> None:
    source = save_source(tmp_path / "source", "llama")
    plan = plan_conversion(str(source), "sla", options={"base": "gdn"})
    convert(*plan, tmp_path / "linear", level="none", say=lambda line: None)
    (tmp_path / "linear" / "gdn.py").unlink()
    assert "gdn.py" in origin_of(tmp_path / "linear", read_plan(tmp_path / "linear")).changed


@pytest.mark.parametrize(
    ("place", "name"),
    [("gsa/gsa", "gsa"), ("gsa/eager", "gsa_eager"), ("hf/cache", "cache"), ("linear/causal", "linear_causal")],
)
def test_a_file_travels_under_the_name_of_its_place(place: str, name: str) -> None:
    assert flat_name(place) == name
    assert kernel_files()[name].with_suffix("").as_posix().endswith(place)
