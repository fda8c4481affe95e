"""`linearize runs` and `linearize compare`."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
from conftest import holds
from pages import Page, eval_result, made_up_run
from training import base
from typer.testing import CliRunner

from linearize.cli import app
from linearize.errors import Exit, LinearizeError
from linearize.page.compare import (
    cells,
    columns,
    compare_page,
    curves,
    figures,
    labels,
    list_runs,
    notes,
    notes_below,
    read_rows,
)
from linearize.page.record import read_run


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("bases")


@pytest.fixture
def two(root: Path, tmp_path: Path) -> list[Path]:
    """Runs `a/run`, which ends at 12 over 10, and `b/run`, which ends at 11 over 10 and was not evaluated."""
    runs = [made_up_run(tmp_path / name, root, name=name, end=end) for name, end in (("a", 12.0), ("b", 11.0))]
    (runs[1] / "eval.json").unlink()
    return runs


def invoke(*words: str) -> str:
    result = CliRunner().invoke(app, list(words), env={"COLUMNS": "200"})
    assert result.exit_code == 0, result.output
    return result.stdout


def test_a_comparison_has_a_row_for_each_run(two: list[Path]) -> None:
    rows = json.loads(invoke("compare", *map(str, two), "--json"))
    assert [row["name"] for row in rows] == ["a", "b"]
    assert [row["ppl_ratio"] for row in rows] == pytest.approx([1.2, 1.1])
    assert [row["kl"] for row in rows] == [0.1, 0.1]  # of the evaluation that perplexity is of
    assert [row["needles"] for row in rows] == [0.25, None]
    assert rows[0]["mechanisms"] == ["gsa"]
    assert rows[0]["state_bytes"] < rows[0]["cache_bytes"]
    table = invoke("compare", *map(str, two))
    assert "training tokens" in table
    assert "1.2000" in table
    assert "1.1000" in table


def test_states_in_two_dtypes_are_named(two: list[Path]) -> None:
    runs = [read_run(folder) for folder in two]
    assert not [note for note in notes(runs) if "dtype" in note]
    assert runs[1].plan is not None
    half = dataclasses.replace(runs[1], plan=dataclasses.replace(runs[1].plan, dtype="bfloat16"))
    (note,) = (note for note in notes([runs[0], half]) if "dtype" in note)
    assert "(float32 of a, bfloat16 of b)" in note


def test_needles_that_the_teacher_does_not_find_have_a_note_below_the_table(two: list[Path]) -> None:
    told = "needles of a compare nothing: the teacher itself finds 0 %"
    assert told not in notes_below(read_rows(two))
    result = json.loads((two[0] / "eval.json").read_text())
    for row in result["needle"]:
        row["student"]["accuracy"] = row["teacher"]["accuracy"] = 0.0
    (two[0] / "eval.json").write_text(json.dumps(result))
    assert told in notes_below(read_rows(two))
    shown = " ".join(CliRunner().invoke(app, ["compare", *map(str, two)], env={"COLUMNS": "200"}).output.split())
    assert shown.index("needles 0.0%") < shown.index(f"note: {told}")
    words = Page(compare_page(read_rows(two))).words
    assert words.index("needles") < words.index(f"Note: {told}.")


def test_empty_cells_name_the_command_that_fills_them(two: list[Path]) -> None:
    """Of a run whose model is there and was not measured; the page has no paths of this machine."""
    other = "same prediction of a is that of linearize eval, on 999 tokens of held.txt"  # training read other text
    assert notes_below(read_rows(two)) == [other]
    (two[1] / "final").mkdir()
    settings = json.loads((two[1] / "run.json").read_text())
    settings["recipe"]["convert"] = {"mechanism": "gsa"}
    settings["recipe"]["data"]["eval"] = {"files": ["held.txt"]}
    (two[1] / "run.json").write_text(json.dumps(settings))
    told = "not measured: linearize eval {0}/final --recipe {0} -o {0}/eval.json measures same predictions and needles"
    assert notes_below(read_rows(two)) == [told.format(two[1]), other]
    shown = CliRunner().invoke(app, ["compare", *map(str, two)], env={"COLUMNS": "200"}).output
    assert f"note: {told.format(two[1])}" in shown
    assert f"Note: {told.format('run')}." in Page(compare_page(read_rows(two))).words
    assert notes_below(read_rows(two[:1])) == [other]


def test_the_page_of_a_comparison_draws_every_run(two: list[Path], tmp_path: Path) -> None:
    where = tmp_path / "compare.html"
    invoke("compare", *map(str, two), "-o", str(where))
    page = Page(where.read_text())
    assert page.sections == ["table", "perplexity", "kl", "memory"]
    assert not page.loads
    assert "Nearest to its teacher in perplexity: b, 1.1000 times" in page.words
    assert where.read_text().count("<svg") == 3


def test_a_stage_on_longer_text_is_not_drawn_beside_the_teacher(two: list[Path]) -> None:
    """Its perplexity is of other blocks than the teacher's: longer ones have a lower one."""
    assert read_run(two[0]).ratio() == pytest.approx(1.2)
    drawn = {key: curves({"a": read_run(two[0])}, key) for key in ("eval_ppl", "eval_kl")}
    assert all(drawn.values())
    path = two[0] / "run.json"
    settings = json.loads(path.read_text())
    settings["recipe"]["stages"][1]["data"]["pack"]["seq_len"] = 64
    path.write_text(json.dumps(settings))
    assert read_run(two[0]).ratio() is None
    for key, before in drawn.items():
        after = curves({"a": read_run(two[0])}, key)
        assert before is not None
        assert after is not None
        assert 0 < after.svg().count("<circle") == before.svg().count("<circle") - 1


def test_runs_of_other_teachers_and_texts_are_noted(two: list[Path]) -> None:
    assert notes(read_rows(two)) == []
    path = two[1] / "run.json"
    settings = json.loads(path.read_text())
    settings["recipe"]["model"]["base"] = "other/model"
    settings["recipe"]["data"]["eval"] = {"files": ["other.txt"]}
    path.write_text(json.dumps(settings))
    found = notes(read_rows(two))
    assert len(found) == 2
    assert "different teachers" in found[0]
    assert "different text" in found[1]


def test_a_file_by_another_spelling_is_the_same_text(two: list[Path], tmp_path: Path) -> None:
    """Of two runs, and of a run and what `linearize eval` wrote; blocks of two lengths have a note of their own."""
    (tmp_path / "work").mkdir()
    held = tmp_path / "held.txt"
    for folder, name in zip(two, ("../held.txt", str(tmp_path / "work" / ".." / "held.txt")), strict=True):
        settings = json.loads((folder / "run.json").read_text())
        settings["recipe"]["data"]["eval"] = {"files": [name]}
        (folder / "run.json").write_text(json.dumps({**settings, "folder": str(tmp_path / "work")}))
    assert notes(read_rows(two)) == []
    block = read_run(two[0]).block("logit_kl")
    teacher = read_run(two[0]).values["model"]["base"]
    result = {**eval_result(), "student": "out/gsa", "teacher": teacher, "read": 512, "tokens": 480, "seq_len": block}
    file = tmp_path / "gsa.json"
    for changes, told in (
        ({"text": str(held)}, []),
        ({"text": f"{tmp_path}/runs/../held.txt"}, []),
        ({"text": f"{tmp_path}/runs/held.txt"}, ["different text"]),
        ({"text": str(held), "read": 256}, ["different text"]),
        ({"text": str(held), "read": 500, "seq_len": 100}, ["blocks of"]),
        ({"text": str(held), "read": 100, "seq_len": 100}, ["different text", "blocks of"]),
    ):
        file.write_text(json.dumps({**result, **changes}))
        found = notes(read_rows([two[0], file]))
        found = [note for note in found if "teachers" not in note]
        assert len(found) == len(told), found
        assert all(words in note for words, note in zip(told, found, strict=True))


def test_models_of_one_original_have_one_teacher(two: list[Path]) -> None:
    """Of two converted folders, and of one and its source; a folder that was trained may teach as it was trained."""
    runs = [read_run(folder) for folder in two]
    model = runs[0].values["model"]
    other = dataclasses.replace(runs[0], settings={"recipe": {**runs[0].values, "model": {**model, "base": "gsa"}}})
    assert runs[1].base != other.base
    assert notes([other, runs[1]]) == []
    assert other.plan is not None
    foreign = dataclasses.replace(other, plan=dataclasses.replace(other.plan, source="foreign"))
    assert "different teachers" in notes([foreign, runs[1]])[0]
    manifest = two[0].parent / "trained" / "linearize.json"
    manifest.parent.mkdir()
    stored = json.loads((Path(model["base"]) / "linearize.json").read_text())
    manifest.write_text(json.dumps({**stored, "recipe": {}}))
    trained = {**runs[0].values, "model": {**model, "base": str(manifest.parent)}}
    found = notes([dataclasses.replace(runs[0], settings={"recipe": trained}), runs[1]])
    assert "different teachers" in found[0]


def test_blocks_of_different_lengths_are_noted(two: list[Path]) -> None:
    path = two[1] / "run.json"
    settings = json.loads(path.read_text())
    settings["recipe"]["data"]["pack"]["seq_len"] = 1024
    own = next(stage for stage in settings["recipe"]["stages"] if stage["name"] == "logit_kl")
    own["data"] = None
    path.write_text(json.dumps(settings))
    block = read_run(two[0]).block("logit_kl")
    assert notes(read_rows(two)) == [f"blocks of {block:,} and 1,024 tokens: perplexities do not compare"]


def test_runs_of_one_name_are_told_apart_by_their_folders(root: Path, tmp_path: Path) -> None:
    runs = read_rows([made_up_run(tmp_path / name, root) for name in ("x", "y")])
    assert labels(runs) == ["x/run", "y/run"]


def test_a_page_has_no_paths_of_this_machine(root: Path, tmp_path: Path, measured: dict[str, Path]) -> None:
    """Of runs of one name, and of a student that nobody measured; the terminal names its whole folder."""
    (measured["student"] / "eval.json").unlink()
    runs = read_rows([*(made_up_run(tmp_path / name, root) for name in ("x", "y")), measured["student"]])
    assert any(str(measured["student"]) in note for note in notes(runs))
    page = compare_page(runs)
    assert f"{measured['student'].name} was not measured" in page
    assert str(tmp_path) not in page
    assert str(measured["student"].parent) not in page


def test_a_run_that_is_named_twice_is_refused(two: list[Path]) -> None:
    with pytest.raises(LinearizeError, match="named twice") as refused:
        read_rows([two[0], two[1] / ".." / ".." / "a" / "run"])
    assert refused.value.code == Exit.USAGE


@pytest.fixture
def measured(root: Path, tmp_path: Path) -> dict[str, Path]:
    """A run, a converted folder with a stored evaluation, a file that eval wrote, and the teacher of all three."""
    linear = base(root, "llama")
    teacher = linear.parent / "source"
    result = {"student": "out/gsa", "teacher": str(teacher), **eval_result()}
    student = tmp_path / "student"
    student.mkdir()
    for name in ("linearize.json", "config.json"):
        (student / name).write_bytes((linear / name).read_bytes())
    (student / "eval.json").write_text(json.dumps({**result, "student_ppl": 11.0, "ppl_ratio": 1.1}))
    file = tmp_path / "measured.json"
    file.write_text(json.dumps(result))
    run = made_up_run(tmp_path, root, name="a")
    (run / "eval.json").write_text(json.dumps({**result, "teacher_ppl": 9.0}))
    return {"run": run, "student": student, "file": file, "teacher": teacher}


def test_students_and_teachers_have_rows_beside_runs(measured: dict[str, Path], tmp_path: Path) -> None:
    rows = json.loads(invoke("compare", *map(str, measured.values()), "--json"))
    assert [row["kind"] for row in rows] == ["run", "student", "student", "teacher"]
    assert [row["name"] for row in rows] == ["a", "student", "out/gsa", "source"]
    assert [row["ppl"] for row in rows] == [12.0, 11.0, 10.5, 9.0]
    assert [row["ppl_ratio"] for row in rows] == pytest.approx([1.2, 1.1, 1.05, 1.0])
    assert [row["needles"] for row in rows] == [0.25, 0.25, 0.25, 1.0]
    assert [row["kl"] for row in rows] == [0.1, 0.07, 0.07, None]
    assert rows[3]["state_bytes"] == rows[0]["cache_bytes"] > rows[0]["state_bytes"] == rows[1]["state_bytes"]
    assert rows[2]["state_bytes"] is None  # where that student lies is not known
    where = tmp_path / "compare.html"
    table = invoke("compare", *map(str, measured.values()), "-o", str(where))
    assert "softmax" in table
    page = Page(where.read_text())
    assert "1 run and 3 models." in page.words
    assert "Nearest to its teacher in perplexity: out/gsa, 1.0500 times" in page.words


def test_the_teacher_of_a_run_is_as_the_run_saw_it(measured: dict[str, Path]) -> None:
    path = measured["run"] / "run.json"
    settings = json.loads(path.read_text())
    settings["recipe"]["teacher"] = {"model": "some/model"}
    path.write_text(json.dumps(settings))
    _, teacher = read_rows([measured["run"], Path("some/model")])
    assert (teacher.name, teacher.ppl, teacher.ratio()) == ("some/model", 10.0, 1.0)


def test_a_model_that_an_evaluation_names_is_found_in_it(measured: dict[str, Path]) -> None:
    (measured["student"] / "eval.json").unlink()
    (note,) = notes(read_rows([measured["student"]]))
    result = f"{measured['student']}.json"
    assert f"linearize eval {measured['student']} --teacher MODEL -o {result}, then linearize compare {result}" in note
    assert "MODEL: the folder source that was converted" in note
    result = json.loads(measured["file"].read_text())
    measured["file"].write_text(json.dumps({**result, "student": "user/student"}))
    rows = read_rows([Path("user/student"), measured["file"]])
    assert [row.ppl for row in rows] == [10.5, 10.5]
    (teacher,) = read_rows([measured["file"], measured["teacher"]])[1:]
    assert teacher.ppl == 10.0


def test_the_finished_model_of_a_run_stands_for_the_run(measured: dict[str, Path]) -> None:
    run = measured["run"]
    (run / "final").mkdir()
    assert read_rows([run / "final"]) == read_rows([run])
    with pytest.raises(LinearizeError, match="named twice"):
        read_rows([run, run / "final"])


def test_a_model_that_nothing_measured_is_refused_with_what_was_found(
    measured: dict[str, Path], two: list[Path], tmp_path: Path
) -> None:
    other = tmp_path / "other"
    other.mkdir()
    (other / "config.json").write_text("{}")
    with pytest.raises(
        LinearizeError, match=f"{other} is a model, and none of a, b was measured against it"
    ) as refused:
        read_rows([*two, other])
    assert refused.value.code == Exit.USAGE
    with pytest.raises(LinearizeError, match="nothing else is named that was measured"):
        read_rows([other])
    (measured["run"] / "checkpoints").mkdir()
    with pytest.raises(LinearizeError, match="is a part of a run"):
        read_rows([measured["run"] / "checkpoints"])
    with pytest.raises(LinearizeError, match=r"no such run '.*/nothing'\. linearize runs lists runs"):
        read_rows([two[0], tmp_path / "nothing"])
    for name, near in (("a/runs", "a/run"), ("a/run/evl.json", "a/run/eval.json")):  # as one has to type it, not `run`
        with pytest.raises(LinearizeError, match=rf"'{tmp_path}/{name}'\. Did you mean '{tmp_path}/{near}'\?"):
            read_rows([two[0], tmp_path / name])


def test_runs_are_listed_with_how_far_they_are(two: list[Path], tmp_path: Path) -> None:
    (two[1] / "report.json").unlink()
    (two[0] / "final").mkdir()
    rows = {row["name"]: row for row in json.loads(invoke("runs", str(tmp_path), "--json"))}
    assert rows["a"]["at"] == "finished"
    assert rows["b"]["at"] == "logit_kl step 40"
    assert list_runs(two[0]) == [rows["a"]]
    assert "logit_kl step 40" in " ".join(invoke("runs", str(tmp_path)).split())


def test_a_run_whose_model_was_removed_is_listed_as_such(two: list[Path]) -> None:
    assert list_runs(two[0])[0]["at"] == "finished, but final/ is gone"
    assert "final/ is gone" in " ".join(invoke("runs", str(two[0])).split())


def test_a_damaged_run_is_listed_with_what_is_wrong(two: list[Path], tmp_path: Path) -> None:
    for damage in ("{", "[]", "null", '[["stages", 1]]'):
        (two[0] / "run.json").write_text(damage)
        rows = list_runs(tmp_path)
        assert sorted("damaged" in row.get("error", "") for row in rows) == [False, True], damage
        assert "damaged" in invoke("runs", str(tmp_path))


def test_a_run_that_cannot_be_read_hides_no_other(two: list[Path], tmp_path: Path) -> None:
    (two[0] / "metrics.jsonl").unlink()
    (two[0] / "metrics.jsonl").mkdir()
    rows = {Path(row["run"]).parent.name: row for row in list_runs(tmp_path)}
    assert rows["a"]["error"] == f"Is a directory ({two[0] / 'metrics.jsonl'})"
    assert "error" not in rows["b"]


def test_a_folder_without_runs_is_refused(tmp_path: Path) -> None:
    for folder in (tmp_path, tmp_path / "nothing"):
        with pytest.raises(LinearizeError, match="linearize finetune"):
            list_runs(folder)


def test_figures_of_a_run_that_just_began_are_empty(two: list[Path]) -> None:
    for name in ("metrics.jsonl", "report.json"):
        (two[1] / name).unlink()
    row = figures(read_run(two[1]))
    assert row["ppl"] is row["ppl_ratio"] is row["kl"] is None
    assert row["tokens"] == 0
    assert not row["finished"]


def image_result(**changes: Any) -> dict[str, Any]:
    """What `linearize eval -o` writes of images."""
    found = {"kind": "images", "data": "pictures/held-out", "asked": 90, "labelled": 90}
    found |= {"student_accuracy": 0.75, "teacher_accuracy": 0.8, "student_ppl": 2.2, "teacher_ppl": 2.0}
    return {"student": "out/a", "teacher": "user/vit", **found, "top1_agreement": 0.9, "kl": 0.07, **changes}


def test_evaluations_of_images_have_accuracy_first_and_a_note_where_the_images_differ(tmp_path: Path) -> None:
    files = [tmp_path / name for name in ("a.json", "b.json")]
    files[0].write_text(json.dumps(image_result()))
    files[1].write_text(json.dumps(image_result(student="out/b", student_accuracy=0.7)))
    rows = read_rows([*files, Path("user/vit")])
    assert [row.unit for row in rows] == ["images"] * 3
    assert [row.accuracy for row in rows] == [0.75, 0.7, 0.8]
    assert list(columns(rows))[4:8] == ["training images", "accuracy", "teacher's accuracy", "perplexity"]
    assert not {"needles", "state at 32k"} & set(columns(rows))
    assert cells(rows[0], "a")["accuracy"] == "75.0%"
    assert [cells(row, "")["teacher's accuracy"] for row in rows] == ["80.0%"] * 3
    assert "Highest accuracy: out/a, 75.0%" in Page(compare_page(rows)).words  # of the students
    assert notes(rows) == []
    for changes in ({"data": "pictures/other"}, {"asked": 80}):
        files[1].write_text(json.dumps(image_result(student="out/b", **changes)))
        (note,) = notes(read_rows(files))
        assert holds(note, "different images", "teacher", "accuracies")
    for number, file in enumerate(files):
        file.write_text(json.dumps(image_result(kind="masked", data=f"{number}.txt")))
    (note,) = notes(read_rows(files))
    assert holds(note, "different text", "amounts", "x teacher", "perplexities")


def test_the_teacher_of_a_run_on_images_has_the_accuracy_that_the_run_saw(two: list[Path]) -> None:
    path = two[1] / "run.json"
    settings = json.loads(path.read_text())
    settings["recipe"] |= {"data": {"train": {"images": "pictures"}}, "teacher": {"model": "user/vit"}}
    path.write_text(json.dumps(settings))
    _, teacher = rows = read_rows([two[1], Path("user/vit")])
    assert (teacher.unit, teacher.accuracy, teacher.ppl) == ("images", 0.5, 10.0)
    assert "needles" not in columns(rows)
