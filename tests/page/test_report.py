"""`linearize report`: one file without a network, whole and small, with a section for everything it promises."""

from __future__ import annotations

import html
import json
import math
import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from pages import Page, eval_result, made_up_run
from training import base, make_recipe, stage, train
from typer.testing import CliRunner

from linearize.checkpoint.atomic import write_result
from linearize.cli import app
from linearize.errors import Exit, LinearizeError
from linearize.page import charts, drawing
from linearize.page import html as page_html
from linearize.page.compare import notes_below
from linearize.page.drawing import COLOURS, Drawing, stacked
from linearize.page.record import read_run
from linearize.page.report import card_pictures, pictures, report_page, times

SECTIONS = [
    "converted",
    "training",
    "fidelity",
    "positions",
    "needles",
    "memory",
    "samples",
    "cost",
    "recipe",
    "versions",
]
DRAWN = ["training", "fidelity", "positions", "needles", "memory"]


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("bases")


@pytest.fixture
def run(root: Path, tmp_path: Path) -> Path:
    return made_up_run(tmp_path, root)


def test_a_page_has_every_section_with_its_drawing_and_loads_nothing(run: Path) -> None:
    text = report_page(read_run(run))
    page = Page(text)
    assert page.sections == SECTIONS
    assert not page.loads
    assert "script" not in page.tags
    assert "http" not in re.sub(r'http-equiv="[^"]*"', "", text)
    assert len(text.encode()) < 100_000
    drawn = re.findall(r"<svg.*?</svg>", text, re.DOTALL)
    assert len(drawn) == len(DRAWN)
    for svg in drawn:
        assert ElementTree.fromstring(svg).get("aria-label")
    assert "Not measured" not in text


def test_a_sample_of_white_space_is_no_empty_box(run: Path) -> None:
    report = json.loads((run / "report.json").read_text())
    report["samples"][0] |= {"teacher": "x = 1", "student": " \n\n"}
    (run / "report.json").write_text(json.dumps(report))
    assert report_page(read_run(run)).count("<pre>(white space alone)</pre>") == 1


def test_a_page_says_what_the_run_says(run: Path) -> None:
    words = Page(report_page(read_run(run))).words
    assert "1.200x" in words  # 12.0 over 10.0
    assert "2 of 2 softmax layers became GSA" in words
    assert "def f(<b>" in words
    assert "\\x1b[31m" in words
    assert "4,096" in words
    assert "2.13.0" in words


def test_tiles_keep_figures_of_the_run_and_of_eval_apart(run: Path) -> None:
    """The run ends at 12.0 over 10.0 and KL 0.1; linearize eval read another text, 10.5 over 10.0 and KL 0.07."""
    text = html.unescape(report_page(read_run(run)))
    own, theirs = re.findall(r'<p class="soft caption">(.*?)</p><div class="tiles">(.*?)</div></div>', text)
    assert own[0] == "The run's last evaluation, 512 held-out tokens in rows of 32, bfloat16"
    assert re.findall("<b>(.*?)</b>", own[1])[:3] == ["1.200x", "12", "0.1000"]
    assert theirs[0] == "linearize eval, 999 tokens of held.txt, float32"
    assert re.findall("<b>(.*?)</b>", theirs[1]) == ["1.050x", "10.5", "0.0700", "90.0%"]
    found = json.loads((run / "eval.json").read_text())
    for part in ({"without": "memory"}, None):  # figures of a part of the student, and none
        (run / "eval.json").write_text(json.dumps(found | part)) if part else (run / "eval.json").unlink()
        assert report_page(read_run(run)).count('class="soft caption"') == 1


def test_tiles_name_both_dtypes_of_an_evaluation(run: Path) -> None:
    found = json.loads((run / "eval.json").read_text())
    (run / "eval.json").write_text(json.dumps(found | {"dtypes": {"student": "bfloat16", "teacher": "float32"}}))
    assert "999 tokens of held.txt, student in bfloat16, teacher in float32" in Page(report_page(read_run(run))).words


def test_what_was_asked_and_written_freely_is_on_the_page(run: Path) -> None:
    found = json.loads((run / "eval.json").read_text())
    free = {"texts": 3, "rows": 2, "length": 256, "student": {"recall": 0.125, "repeated": 0.25}}
    free["teacher"] = {"recall": 0.5, "repeated": 0.125}
    row = {"length": 1024, "entries": 32, "student": {"accuracy": 0.25}, "teacher": {"accuracy": 0.75}}
    (run / "eval.json").write_text(json.dumps(found | {"generated": free, "recall": [row]}))
    words = Page(report_page(read_run(run))).words
    assert "recall at 1,024 tokens, 32 entries25.0%75.0%" in words
    assert "recall written freely, 2 lists of 256 tokens12.5%50.0%" in words
    assert "written tokens that repeat (runs of 4), 3 texts25.0%12.5%" in words
    assert "Python written" not in words
    assert "tokens back" not in words
    kinds = [{"from": 0, "to": 0, "tokens": 30, "kl": 0.1}, {"from": 2049, "to": None, "tokens": 10, "kl": 0.9}]
    kinds = [kind | {"student_ppl": 12.0, "teacher_ppl": 10.0, "ppl_ratio": 1.2} for kind in kinds]
    (run / "eval.json").write_text(json.dumps(found | {"repeats": kinds}))
    words = Page(report_page(read_run(run))).words
    assert "new75.0%12.000010.00001.20000.100025.0%" in words
    assert "over 2,04825.0%12.000010.00001.20000.900075.0%" in words


def test_positions_are_of_eval_where_it_measured_some_and_say_so(run: Path) -> None:
    found, report = (json.loads((run / name).read_text()) for name in ("eval.json", "report.json"))
    (run / "report.json").write_text(json.dumps(report | {"positions": found["positions"]}))
    assert "Measured by linearize eval; KL" in Page(report_page(read_run(run))).words
    (run / "eval.json").unlink()
    assert "Measured at the end of finetune; KL" in Page(report_page(read_run(run))).words


def test_the_cost_of_a_run_that_was_resumed_is_that_of_all_its_processes(run: Path) -> None:
    """Each notes its own rate: 100 tokens at 50 a second, then 100 more at 25, and the larger memory."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    stage = next(line["stage"] for line in lines if line.get("tokens_per_s"))
    steps = [{"stage": stage, "step": n, "tokens": 10 * n, "tokens_per_s": 50, "memory": 3 << 30} for n in (5, 10)]
    steps += [
        {"stage": stage, "step": n, "tokens": 10 * n, "tokens_per_s": 25, "memory": 1 << 30, "since": 10}
        for n in (15, 20)
    ]
    kept = [line for line in lines if line["stage"] != stage or not line.get("tokens_per_s")]
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in kept + steps))
    assert read_run(run).seconds(stage) == 6.0
    rows = re.findall(r"<tr>.*?</tr>", report_page(read_run(run)))
    cells = [re.findall(r"<td[^>]*>(.*?)</td>", row) for row in rows if stage in row]
    assert [stage, "new", "20", "200", "33", "6 s", "3.0 GiB"] in cells


def test_tiles_compare_the_same_blocks_alone(run: Path) -> None:
    """A last stage that is evaluated on blocks of another length has no ratio to what the teacher had."""
    settings = json.loads((run / "run.json").read_text())
    settings["recipe"]["stages"][-1]["data"] = {"pack": {"seq_len": 16}}
    (run / "run.json").write_text(json.dumps(settings))
    tiles = report_page(read_run(run)).partition("<nav>")[0]
    assert "1.200x" not in tiles
    assert "held-out perplexity<" in tiles


def test_every_colour_of_a_page_has_a_light_and_a_dark_value(run: Path) -> None:
    text = report_page(read_run(run))
    used = set(re.findall(r"var\(--(\w+)\)", text))
    light, dark = (dict(re.findall(r"--(\w+): (#\w+);", part)) for part in text.split("prefers-color-scheme: dark", 1))
    assert used <= light.keys() == set(COLOURS)
    assert all(light[name] != dark[name] for name in used)


def test_a_long_run_makes_a_small_page(root: Path, tmp_path: Path) -> None:
    place = made_up_run(tmp_path, root, steps=20_000)
    assert len(report_page(read_run(place)).encode()) < 2 * 2**20


def test_what_was_not_measured_names_the_command_that_measures_it(run: Path) -> None:
    (run / "eval.json").unlink()
    (run / "final").mkdir()
    settings = json.loads((run / "run.json").read_text())
    for convert, data, other in (
        ({"mechanism": "gsa"}, {"eval": {"files": ["/held out.txt"]}}, ""),
        (None, {"eval": None}, " --teacher MODEL 'data.eval={files: [FILE.txt]}'"),
    ):
        settings["recipe"] |= {"convert": convert, "data": {**settings["recipe"]["data"], **data}}
        (run / "run.json").write_text(json.dumps(settings))
        page = Page(report_page(read_run(run)))
        assert page.sections == SECTIONS
        commands = f"linearize eval run/final --recipe run{other} -o run/eval.json\nlinearize report run"
        assert page.words.count(commands) == 2
        assert page.words.count("in the folder that holds the run") == 2


def test_a_command_of_a_page_names_no_teacher_that_the_student_names(
    run: Path, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a run from a converted model, whose source lies where the run was started."""
    (run / "eval.json").unlink()
    (run / "final").mkdir()
    assert "--teacher MODEL" in Page(report_page(read_run(run))).words
    monkeypatch.chdir(base(root, "llama").parent)
    assert "--teacher" not in Page(report_page(read_run(run))).words


def test_an_evaluation_after_calibration_is_called_so(run: Path) -> None:
    assert "converted, calibrated" not in report_page(read_run(run))
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    first = next(line for line in lines if line["stage"] == "converted")
    first["calibrated"] = True
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert ">converted, calibrated<" in report_page(read_run(run))


def test_commands_of_a_page_are_for_the_folder_where_the_run_was_started(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There relative names in its recipe are those of files."""
    (run / "eval.json").unlink()
    (tmp_path / "my runs").mkdir()
    place = run.rename(tmp_path / "my runs" / "run")
    settings = json.loads((place / "run.json").read_text())
    settings["recipe"]["output_dir"] = "my runs/run"
    (place / "run.json").write_text(json.dumps(settings))
    words = Page(report_page(read_run(place))).words
    assert "in the folder where the run was started" in words
    assert "linearize report 'my runs/run'" in words
    monkeypatch.chdir(tmp_path)
    words = Page(report_page(read_run(Path("my runs/run")))).words
    assert "these commands measure it" in words
    assert "linearize eval 'my runs/run/final' --recipe 'my runs/run'" in words


def test_a_page_of_a_run_without_a_model_says_what_there_is(run: Path) -> None:
    (run / "eval.json").unlink()
    told = "Not measured: the run is finished, but final/ is gone. Once final/ is there, these commands"
    assert Page(report_page(read_run(run))).words.count(told) == 2
    (run / "report.json").unlink()
    told = "Not measured: the run is not finished (logit_kl step 40). Once final/ is there, these commands"
    assert Page(report_page(read_run(run))).words.count(told) == 2


def test_a_page_of_a_run_has_no_paths_of_this_machine(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The paths that somebody typed stay as they were typed, for the commands to run."""
    (run / "eval.json").unlink()
    assert str(tmp_path) in (run / "run.json").read_text()
    assert str(tmp_path) not in report_page(read_run(run))
    monkeypatch.chdir(run.parent)
    page = report_page(read_run(Path(run.name)))
    assert f"linearize eval {run.name}/final" in page
    assert "in the folder that holds the run" not in page


def test_a_run_that_just_began_has_a_page(run: Path) -> None:
    for name in ("metrics.jsonl", "report.json", "eval.json"):
        (run / name).unlink()
    words = Page(report_page(read_run(run))).words
    assert "The run is not finished." in words
    assert "No step was trained yet" in words


@pytest.mark.timeout(60)
def test_metrics_from_a_pipe_are_not_waited_for(run: Path) -> None:
    (run / "metrics.jsonl").unlink()
    os.mkfifo(run / "metrics.jsonl")
    with pytest.raises(LinearizeError, match=r"metrics\.jsonl is a pipe or a device: not a file"):
        read_run(run)


def test_secrets_of_a_recipe_stay_out_of_its_page(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "a-secret-value")
    settings = json.loads((run / "run.json").read_text())
    settings["versions"]["torch"] = "a-secret-value"
    (run / "run.json").write_text(json.dumps(settings))
    assert "a-secret-value" not in report_page(read_run(run))


def test_needles_are_drawn_by_depth_where_they_were_measured(run: Path) -> None:
    with_depths = pictures(read_run(run))["needles"]
    assert "at 10 % of the text" in with_depths.svg()
    (run / "eval.json").write_text(json.dumps(eval_result(depths=False)))
    alone = pictures(read_run(run))["needles"].svg()
    assert "at 50 % of the text" in alone
    assert "at 10 % of the text" not in alone


def test_positions_name_a_trained_length_that_is_recorded_alone(run: Path) -> None:
    assert "Training had rows of 512 tokens" in Page(report_page(read_run(run))).words
    result = eval_result()
    result["positions"]["recorded"] = False
    (run / "eval.json").write_text(json.dumps(result))
    assert "Training had rows" not in Page(report_page(read_run(run))).words


def test_needles_that_the_teacher_does_not_find_compare_nothing(run: Path) -> None:
    assert "nothing here" not in Page(report_page(read_run(run))).words
    result = eval_result()
    for row in result["needle"]:
        row["teacher"]["accuracy"] = 0.001
    (run / "eval.json").write_text(json.dumps({**result, "recall": result["needle"]}))
    told = "Note: recall and needle compare nothing here: the teacher itself finds 0 %."
    assert told in Page(report_page(read_run(run))).words


def test_pictures_are_png_files_with_something_on_them(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from PIL import Image

    monkeypatch.setattr(drawing, "SCALE", 2)
    found = card_pictures(read_run(run))
    assert [name.removesuffix(".png") for name in found] == DRAWN
    for name, (data, about) in found.items():
        (run / name).write_bytes(data)
        with Image.open(run / name) as image:
            assert image.width >= 1000
            assert len(image.convert("RGB").getcolors(1 << 20) or ()) > 5
        assert "at the end" not in about
        assert len(data) < 150_000


def test_what_a_picture_shows_says_where(run: Path) -> None:
    """In words, for whoever does not see it."""
    about = {name: drawn.about for name, drawn in pictures(read_run(run)).items()}
    assert about["memory"].startswith("Memory of a sequence while decoding, at 1M tokens of context: source: cache ")
    assert "Held-out perplexity, at 5.12k training tokens: student 12, teacher 10" in about["training"]
    assert about["positions"].startswith("Perplexity by position in long texts, at 2k tokens into the text: student ")
    two = [charts.Series(name, [(1.0, 2.0), (end, 3.0)], "blue") for name, end in (("a", 5.0), ("b", 9.0))]
    assert charts.lines("t", two, charts.Axis("x"), charts.Axis("y")).about == "t, at the end: a 3, b 3"


def test_without_pillow_there_are_no_pictures(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def lacking(self: Drawing) -> bytes:
        raise ImportError("no PIL")

    monkeypatch.setattr(Drawing, "png", lacking)
    assert card_pictures(read_run(run)) == {}


def test_the_command_writes_the_page_where_it_is_told(run: Path, tmp_path: Path) -> None:
    other = tmp_path / "other.json"
    other.write_text(json.dumps(eval_result() | {"kl": 0.123}))
    where = tmp_path / "new" / "page.html"
    result = CliRunner().invoke(app, ["report", str(run), "-o", str(where), "--eval", str(other), "--json"])
    assert result.exit_code == 0, result.output
    told = json.loads(result.stdout.splitlines()[-1])
    assert told["bytes"] == where.stat().st_size
    assert "0.123" in Page(where.read_text()).words
    assert not (run / "report.html").exists()


def test_a_page_takes_no_place_but_that_of_a_page(run: Path, root: Path, tmp_path: Path) -> None:
    model = Path(shutil.copytree(base(root, "llama"), tmp_path / "model"))
    notes, empty, pipe = tmp_path / "notes.html", tmp_path / "empty.html", tmp_path / "pipe.html"
    notes.write_text("<!DOCTYPE html>\n<html><p>mine</p></html>\n")
    os.mkfifo(pipe)
    (tmp_path / "link.html").symlink_to(notes)
    for command in (["report", str(run)], ["compare", str(run)]):
        for place, message in (
            (model / "config.json", "is there already, and linearize"),
            (model / "model-mixers.safetensors", "is there already, and linearize"),
            (notes, f"linearize {command[0]} did not write it. Choose another file, or move that one away"),
            (tmp_path / "link.html", "is there already"),
            (model, "model is a folder. Name a file in it"),
            (pipe, "not a file"),
            (notes / "page.html", "notes.html"),
        ):
            before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
            result = CliRunner().invoke(app, [*command, "-o", str(place)])
            assert isinstance(result.exception, LinearizeError), place
            assert message in result.exception.message
            assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before
        empty.write_text("")
        for _ in range(2):  # a page of its own is replaced
            assert CliRunner().invoke(app, [*command, "-o", str(empty)]).exit_code == 0
        assert len(empty.read_text()) > 1000


def test_two_who_write_one_page_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each has a temporary file of its own; it is never reached through a link."""
    page, rename = tmp_path / "page.html", Path.rename

    def overtaken(path: Path, target: Path) -> Path:
        monkeypatch.setattr(Path, "rename", rename)
        monkeypatch.setattr(os, "getpid", lambda: 1)  # another process
        write_result(page, "second")
        return rename(path, target)

    monkeypatch.setattr(Path, "rename", overtaken)
    write_result(page, "first")
    assert page.read_text() == "first"
    (tmp_path / "theirs").write_text("theirs")
    (tmp_path / ".page.html.linearize.1.tmp").symlink_to("theirs")
    write_result(page, "third")
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == {"page.html": "third", "theirs": "theirs"}


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("run.json", '{"recipe": {"model": {"base": "x"}, "stages": 3, "name": "n"}}'),
        ("run.json", '{"recipe": {"model": "x", "stages": [{"kind": "sft"}], "name": "n"}}'),
        ("report.json", '{"layers": {"a": 1}}'),
        ("eval.json", '{"student_ppl": 1.0, "teacher_ppl": 1.0, "kl": "x", "needle": 7, "positions": []}'),
    ],
)
def test_files_of_a_run_that_say_anything(run: Path, root: Path, tmp_path: Path, name: str, text: str) -> None:
    (run / name).write_text(text)
    (tmp_path / "two").mkdir()
    other = made_up_run(tmp_path / "two", root)
    for command in (["report", str(run)], ["compare", str(other), str(run), "-o", str(tmp_path / "page.html")]):
        result = CliRunner().invoke(app, command)
        if name == "report.json" and command[0] == "compare":  # which shows nothing of it
            continue
        assert isinstance(result.exception, LinearizeError), (command, result.exception)
        assert result.exception.code == Exit.USAGE
        assert re.search(rf"{run} is damaged .*Restore its run.json", result.exception.message)
    assert not (tmp_path / "page.html").exists() or name == "report.json"
    listed = CliRunner().invoke(app, ["runs", str(tmp_path), "--json"])
    assert listed.exit_code == 0, listed.exception


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("metrics.jsonl", {"step": 0, "loss": 1.0, "tokens_per_s": 5.0}),
        ("metrics.jsonl", {"step": 1, "loss": 10**400}),
        ("eval.json", {"student_ppl": 3.0, "teacher_ppl": 10**400, "kl": 0.1, "top1_agreement": 0.5, "tokens": 9}),
        ("eval.json", {"student_ppl": 3.0, "teacher_ppl": 0, "kl": 0.1, "top1_agreement": 0.5, "tokens": 9}),
    ],
)
def test_numbers_that_no_run_writes(run: Path, tmp_path: Path, name: str, values: dict[str, Any]) -> None:
    """Steps and perplexities of nothing, and integers that no float holds: told, or left out of the page."""
    stage = json.loads((run / "run.json").read_text())["recipe"]["stages"][0]["name"]
    (run / name).write_text(json.dumps({"stage": stage, "tokens": 9, **values}))
    for command in (["report", str(run)], ["compare", str(run), "-o", str(tmp_path / "page.html")]):
        result = CliRunner().invoke(app, command)
        told = isinstance(result.exception, LinearizeError) and result.exception.code == Exit.USAGE
        assert told or result.exit_code == 0, (command, result.exception)
    assert CliRunner().invoke(app, ["runs", str(tmp_path), "--json"]).exit_code == 0


def test_what_is_no_run_is_refused(run: Path, tmp_path: Path) -> None:
    for folder, message in (
        (tmp_path / "nothing", "nothing"),
        (tmp_path, f"It holds the runs {run}. linearize"),
        (run / "cache", "give the run itself"),
    ):
        if folder.name == "cache":
            folder.mkdir()
        with pytest.raises(LinearizeError, match=message) as refused:
            read_run(folder)
        assert refused.value.code == Exit.USAGE
    (run / "eval.json").write_text("{}")
    with pytest.raises(LinearizeError, match="linearize eval -o writes"):
        read_run(run)


def test_finetune_ends_with_a_page_and_with_pictures_in_the_card(root: Path, tmp_path: Path) -> None:
    recipe = make_recipe(
        tmp_path,
        base(root, "llama", layers="0"),
        stage("attention_transfer"),
        stage("logit_kl", "all"),
        data={"train": {"files": ["train.jsonl"]}, "eval": {"files": ["heldout.txt"]}, "pack": {"seq_len": 32}},
        eval={"max_tokens": 256},
    )
    report = train(recipe)
    record = read_run(tmp_path / "run")
    assert record.layers("before").keys() == record.layers("after").keys() == {0}
    assert [set(sample) for sample in report["samples"]] == [{"prompt", "teacher", "student", "text"}] * 3
    words = Page((tmp_path / "run" / "report.html").read_text()).words
    assert "1 of 2 softmax layers became GSA; layer 1 keeps softmax" in words
    assert json.loads((tmp_path / "run" / "run.json").read_text())["folder"] == str(tmp_path)
    card = (tmp_path / "run" / "final" / "README.md").read_text()
    named = re.findall(r"!\[.+\]\((.+)\)", card)
    assert named[0] == "pictures/training.png"
    assert {"pictures/fidelity.png", "pictures/memory.png"} <= set(named)
    listed = json.loads((tmp_path / "run" / "final" / "linearize.json").read_text())["files"]
    assert all((tmp_path / "run" / "final" / name).is_file() and name in listed for name in named)


def test_a_short_word_of_a_table_stays_on_one_line() -> None:
    made = page_html.table(
        {"layers": "text", "options": "text"}, [("4-7", "a/long/path/that/may-break"), ("0", "two words")]
    )
    found = re.findall(r'<td class="text( whole)?">([^<]*)<', made)
    assert found == [(" whole", "4-7"), ("", "a/long/path/that/may-break"), (" whole", "0"), ("", "two words")]
    assert ".whole { white-space: nowrap; }" in page_html.STYLE


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_a_browser_shows_the_page(run: Path, theme: str) -> None:
    from PIL import Image

    browser = shutil.which("chromium") or shutil.which("google-chrome")
    if browser is None:
        pytest.skip("needs chromium")
    (run / "page.html").write_text(report_page(read_run(run)))
    wanted = ["--blink-settings=preferredColorScheme=0", "--force-dark-mode"] if theme == "dark" else []
    options = [
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        "--window-size=900,5000",
        f"--user-data-dir={run / 'profile'}",
    ]
    picture = run / "page.png"
    command = [browser, *options, *wanted, f"--screenshot={picture}", (run / "page.html").as_uri()]
    subprocess.run(command, check=True, capture_output=True, timeout=120)
    with Image.open(picture) as image:
        pixels = image.convert("RGB")
        paper = "#{:02x}{:02x}{:02x}".format(*pixels.getpixel((3, 3)))
        shown = {"#{:02x}{:02x}{:02x}".format(*colour) for _, colour in pixels.getcolors(1 << 24)}
    assert paper == COLOURS["paper"][theme == "dark"]
    assert {COLOURS[name][theme == "dark"] for name in ("blue", "grid", "ink")} <= shown


# ---------------------------------------------------------------- drawing


@pytest.mark.parametrize(
    ("low", "high", "log"), [(0, 1, False), (9.8, 11.2, False), (3, 3e9, True), (0.036, 0.11, True), (512, 1e6, True)]
)
def test_ticks_are_few_and_within(low: float, high: float, log: bool) -> None:
    found = charts.ticks(low, high, log)
    assert 2 <= len(found) <= 8
    assert all(low * 0.99 <= value <= high * 1.01 for value in found)
    assert len({charts.number(value) for value in found}) == len(found)


@pytest.mark.parametrize("values", [(9.8701, 9.8697, 9.8702), (1e-5, 1.0002e-5), (12_345_000.0, 12_345_100.0)])
@pytest.mark.parametrize("log", [False, True])
def test_ticks_of_a_flat_curve_tell_each_other_apart(values: tuple[float, ...], log: bool) -> None:
    series = [charts.Series("student", list(enumerate(values, 1)), "blue", dots=True)]
    svg = charts.lines("t", series, charts.Axis("x"), charts.Axis("perplexity", log)).svg()
    labels = [node.text for node in ElementTree.fromstring(svg).iter("text") if node.get("text-anchor") == "end"]
    assert len(labels) > 3  # the ticks, and the label of the other axis
    assert len(labels) == len(set(labels))


def test_values_that_are_not_finite_are_left_out() -> None:
    series = [charts.Series("a", [(1.0, math.nan), (2.0, 3.0), (3.0, math.inf), (4.0, 0.0)], "blue")]
    drawn = charts.lines("t", series, charts.Axis("x"), charts.Axis("y", log=True))
    assert "nan" not in drawn.svg()
    with pytest.raises(ValueError, match="no values"):
        charts.lines("t", [charts.Series("a", [(1.0, math.nan)], "blue")], charts.Axis("x"), charts.Axis("y"))


def test_a_line_of_many_points_keeps_its_ends_and_its_mean() -> None:
    points = [(float(n), float(n % 7)) for n in range(10_001)]
    thin = charts.thinned(points)
    assert len(thin) <= charts.MOST_POINTS + 1
    assert thin[-1] == points[-1]
    assert sum(y for _, y in thin) / len(thin) == pytest.approx(3.0, abs=0.1)


def test_hints_and_labels_are_escaped() -> None:
    series = [charts.Series('a"<b>', [(1.0, 2.0), (2.0, 3.0)], "blue", dots=True)]
    drawn = charts.lines("<title>", series, charts.Axis("x"), charts.Axis("y"))
    root = ElementTree.fromstring(stacked([drawn, drawn]).svg())
    assert any('a"<b>' in (node.text or "") for node in root.iter())


def test_eighty_layers_fit_on_an_axis(run: Path) -> None:
    path = run / "report.json"
    rows = [{"layer": layer, "relative_mse": 0.01 * (layer + 1), "cosine": 0.9} for layer in range(80)]
    path.write_text(json.dumps(json.loads(path.read_text()) | {"layers": rows}))
    drawn = pictures(read_run(run))["fidelity"]
    labels = [node.text for node in ElementTree.fromstring(drawn.svg()).iter("text")]
    assert 10 < sum(str(label).isdigit() for label in labels) < 40


def test_a_ratio_that_is_no_number_is_not_called_one() -> None:
    assert times(3.0, 2.0) == "1.500x"
    for ours, theirs in ((math.nan, 2.0), (3.0, 0.0), (math.inf, 2.0)):
        assert times(ours, theirs) == "not finite"


def test_what_was_told_while_a_run_was_made_is_on_its_page(run: Path) -> None:
    """And in a comparison; without places on this machine."""
    settings = json.loads((run / "run.json").read_text())
    parts = [{"stage": 1, "step": 7, "changed": ["stages[1].optimizer.lr 0.001 -> 0.002"]}]
    notes = ["note: data.train and data.eval both read /some/where/text.txt: nothing is held out"]
    (run / "run.json").write_text(json.dumps(settings | {"max_steps": 12, "parts": parts, "notes": notes}))
    found = json.loads((run / "eval.json").read_text())
    (run / "eval.json").write_text(json.dumps(found | {"notes": ["note: /some/m has no converted layer"]}))
    for words in (Page(report_page(read_run(run))).words, " ".join(notes_below([read_run(run)]))):
        for told in ("--max-steps 12", "step 7 of logit_kl", "0.001 -> 0.002", "read text.txt: nothing is held out"):
            assert told in words
        assert "linearize eval: m has no converted layer" in words
        assert "/some" not in words
