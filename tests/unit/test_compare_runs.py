"""Tests of `llmtrain compare RUN RUN`, and of which runs can be compared in which unit."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import yaml
from filelock import FileLock

from llmtrain.cli import main
from llmtrain.compare.measures import Outcome, gather
from llmtrain.compare.report import headline, write_report
from llmtrain.compare.results import load_trials
from llmtrain.errors import ResultsError
from llmtrain.recipe_loader import load_recipe, resolved_yaml
from llmtrain.validated_text import RATIO, common_unit, read_validated_text

RECIPE = Path(__file__).parents[2] / "recipes" / "edit_llama_stdlib.yaml"
BYTES_PER_TOKEN = 3.0


def lines_of(loss: float, bytes_per_token: float) -> list[dict[str, Any]]:
    validation = {"eval/loss": loss, "eval/bpb": loss / math.log(2) / bytes_per_token}
    return [
        {"step": 0, "tokens": 0, "seconds": 0.0, "eval/loss": 8.0, "eval/bpb": 8.0 / math.log(2) / bytes_per_token},
        {"step": 10, "tokens": 1000, "seconds": 90.0, "train/loss": loss - 0.5, "comm/bytes_total": 2e6},
        {"step": 10, "tokens": 1000, "seconds": 90.0, **validation},
    ]


def write(
    folder: Path, name: str, loss: float, *keys: str, tokenizer: str = "{}", ratio: float = BYTES_PER_TOKEN
) -> Path:
    """Write a run directory as training leaves it."""
    recipe = load_recipe(RECIPE, [f"run.out_dir={folder}", f"run.name={name}", *keys])
    path = folder / name
    (path / "tokenizer").mkdir(parents=True)
    (path / "tokenizer" / "tokenizer.json").write_text(tokenizer)
    (path / "recipe.yaml").write_text(resolved_yaml(recipe))
    (path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines_of(loss, ratio)))
    (path / "summary.json").write_text(json.dumps({"stopped": "done", "steps": 10}))
    return path


def compared(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as left:
        main(["compare", *map(str, arguments)])
    output = capsys.readouterr()
    return left.value.code or 0, output.out, output.err


def test_runs_are_listed_by_their_validation_loss_and_drawn(tmp_path: Path, capsys) -> None:
    folders = [write(tmp_path, "a", 4.5), write(tmp_path, "b", 4.25, "sync.method=diloco")]
    with FileLock(folders[0] / ".lock"):  # held while a run is in progress
        code, output, _ = compared(capsys, *folders, "--out", tmp_path / "report")
    assert code == 0
    head, best, other, picture = output.splitlines()
    assert (
        " ".join(head.split()) == "name method state steps tokens train loss val. loss training time between replicas"
    )
    assert best.split() == ["b", "diloco", "done", "10", "1,000", "3.7500", "4.2500", "1.5", "minutes", "2.0", "MB"]
    assert other.split()[:3] == ["a", "edit", "running"]
    assert picture == f"picture: {tmp_path / 'report/losses.png'}"
    assert (tmp_path / "report/losses.png").read_bytes().startswith(b"\x89PNG")


def test_a_run_that_has_logged_nothing_comes_last(tmp_path: Path, capsys) -> None:
    folders = [write(tmp_path, "new", 4.5), write(tmp_path, "b", 4.25)]
    (folders[0] / "metrics.jsonl").write_text("")
    code, output, _ = compared(capsys, *folders, "--out", tmp_path)
    assert code == 0 and [line.split()[0] for line in output.splitlines()[1:3]] == ["b", "new"]
    assert output.splitlines()[2].split()[3:7] == ["10", "0", "-", "-"]


def test_runs_of_one_name_are_told_apart_by_their_folders(tmp_path: Path, capsys) -> None:
    folders = [write(tmp_path / one, "seed-1", 4.0) for one in ("x", "y")]
    _, output, _ = compared(capsys, *folders, "--out", tmp_path)
    assert {line.split()[0] for line in output.splitlines()[1:3]} == set(map(str, folders))


def test_all_runs_of_a_folder_are_compared(tmp_path: Path, capsys) -> None:
    for name in ("a", "b"):
        write(tmp_path / "runs", name, 4.0)
    _, output, _ = compared(capsys, tmp_path / "runs", "--out", tmp_path)
    assert [line.split()[0] for line in output.splitlines()[1:3]] == ["a", "b"]


@pytest.mark.parametrize(
    ("made", "message"), [("folder", "holds no run"), ("file", "is not a folder"), (None, "does not exist")]
)
def test_a_folder_that_is_no_run_is_one_line(tmp_path: Path, capsys, made: str | None, message: str) -> None:
    other = tmp_path / "other"
    if made == "folder":
        other.mkdir()
    elif made == "file":
        other.write_text("")
    code, output, error = compared(capsys, write(tmp_path, "a", 4.0), other, "--out", tmp_path)
    assert code == 2 and not output
    assert error.startswith(f"error: {other} {message}; give run directories") and error.count("\n") == 1


def test_nobody_is_told_to_delete_a_run_because_of_a_damaged_recipe(tmp_path: Path) -> None:
    run = write(tmp_path, "a", 4.5)
    remedy = r"\(.*\); restore the file, or leave this run out$"
    (run / "recipe.yaml").write_text("sync: edit")
    with pytest.raises(ResultsError, match=f"a is not a valid trial {remedy}"):
        load_trials([run])
    (run / "recipe.yaml").write_text("data: [")
    for read in (lambda: load_trials([run]), lambda: read_validated_text(run, [])):
        with pytest.raises(ResultsError, match=rf"recipe\.yaml is damaged {remedy}"):
            read()


def test_a_picture_that_cannot_be_written_is_one_line(tmp_path: Path, capsys) -> None:
    (tmp_path / "file").write_text("")
    code, _, error = compared(capsys, write(tmp_path, "a", 4.0), "--out", tmp_path / "file")
    assert code == 2 and "choose another --out" in error and error.count("\n") == 1


@pytest.mark.parametrize(("taken", "why"), [("report", "Not a directory"), ("report/plots", "File exists")])
def test_a_report_that_cannot_be_written_is_one_line(tmp_path: Path, capsys, taken: str, why: str) -> None:
    out, file = tmp_path / "report", tmp_path / taken
    file.parent.mkdir(exist_ok=True)
    file.write_text("")
    code, _, error = compared(capsys, write(tmp_path, "a", 4.0), "--report", "--out", out)
    assert (code, error) == (2, f"error: {out} can't be written ({why}); choose another --out\n")


def test_a_file_or_nothing_is_a_comparison(tmp_path: Path, capsys) -> None:
    assert "comparisons are YAML files" in compared(capsys, tmp_path / "none")[2]
    (tmp_path / "file.yaml").write_text("a: 1")
    assert "file.yaml: " in compared(capsys, tmp_path / "file.yaml", "a=b")[2]


@pytest.mark.parametrize("option", ["--report", "--baseline=a", "--target=3.5"])
def test_an_option_of_reports_writes_a_report(tmp_path: Path, capsys, option: str) -> None:
    code, output, _ = compared(capsys, write(tmp_path, "a", 4.0), option, "--out", tmp_path / "out")
    assert code == 0 and output.startswith(str(tmp_path / "out")) and (tmp_path / "out/report.html").exists()


@pytest.mark.parametrize("target", ["inf", "nan", "0", "-1"])
def test_a_target_that_is_no_loss_is_refused(tmp_path: Path, capsys, target: str) -> None:
    code, output, error = compared(capsys, write(tmp_path, "a", 4.0), "--target", target, "--out", tmp_path / "out")
    assert (code, output, error) == (2, "", f"error: --target is {target}; give a finite loss above 0\n")


@pytest.mark.parametrize("options", [["--retry"], ["--no-shaping"], ["--report", "--retry"]])
def test_an_option_of_trials_is_not_ignored(tmp_path: Path, capsys, options: list[str]) -> None:
    code, output, error = compared(capsys, write(tmp_path, "a", 4.0), *options)
    assert code == 2 and not output
    assert (
        error
        == "error: --retry and --no-shaping are for the trials of a comparison file; give one, or leave them out\n"
    )


@pytest.mark.parametrize("options", [["--out", "x"], ["--report"], ["--baseline=a"], ["--target=3.5"]])
def test_an_option_of_given_runs_is_not_ignored(tmp_path: Path, capsys, options: list[str]) -> None:
    (tmp_path / "file.yaml").write_text("a: 1")
    code, output, error = compared(capsys, tmp_path / "file.yaml", *options)
    assert code == 2 and not output and error.count("\n") == 1
    assert error.startswith("error: --report, --baseline, --target and --out are for given runs, and these are none")


OTHER = "data.tokenizer=train:999"


def test_different_tokenizers_are_compared_in_bits_per_byte(tmp_path: Path, capsys) -> None:
    """The run with the coarse tokenizer has the higher loss per token but the better model."""
    fine = write(tmp_path, "fine", 4.0, ratio=3.0)
    coarse = write(tmp_path, "coarse", 4.5, OTHER, tokenizer="other", ratio=4.0)
    _, output, _ = compared(capsys, fine, coarse, "--out", tmp_path)
    head, best, _, warning, _ = output.splitlines()
    assert "bits/byte" in head and best.split()[:8] == [
        *("coarse", "edit", "done", "10", "1,000"),
        *("4.0000", "4.5000", f"{4.5 / math.log(2) / 4:.4f}"),
    ]
    assert warning == (
        "warning: fine and coarse have different tokenizers (train:2048 and train:999): compared in bits per byte, not by "
        "loss per token"
    )


def test_a_report_on_different_tokenizers_is_in_bits_per_byte(tmp_path: Path) -> None:
    folders = [write(tmp_path, "fine", 4.0), write(tmp_path, "coarse", 4.5, OTHER, tokenizer="other", ratio=4.0)]
    results = gather(load_trials(folders), baseline="fine")
    finals = results.runs["final_loss"]["median"]
    assert finals.tolist() == pytest.approx([4.0 / math.log(2) / 3, 4.5 / math.log(2) / 4])
    assert results.runs.loc[("as run", "coarse"), ("outcome", "")] == Outcome.FASTER
    write_report(results, tmp_path / "report")
    text = (tmp_path / "report/report.md").read_text()
    assert "Warning: fine and coarse have different tokenizers" in text and "in bits per byte." in text


def test_runs_on_different_texts_are_not_ranked(tmp_path: Path, capsys) -> None:
    a = write(tmp_path, "a", 4.5, "data.source=news.txt")
    b = write(tmp_path, "b", 4.25, "data.source=tales.txt", ratio=4.0)
    _, output, _ = compared(capsys, a, b, "--out", tmp_path)
    _, first, _, warning, _ = output.splitlines()
    assert first.split()[0] == "a", "in the order given"
    assert "different texts (data.source is news.txt in a, and tales.txt in b)" in warning
    results = gather(load_trials([a, b]), target=4.75)
    assert headline(results) == f"Nothing to compare: {results.unit.note}"
    assert results.runs.loc[("as run", "b"), ("outcome", "")] == Outcome.NOT_COMPARABLE
    write_report(results, tmp_path / "report")
    assert "Target: none, because losses can't be compared." in (tmp_path / "report/report.md").read_text()
    for baseline in ("a", "b"):
        runs = gather(load_trials([a, b]), baseline).runs
        assert runs[["speed_up", "own_speed_up"]].xs("median", axis=1, level=1).isna().all(axis=None)


def test_runs_whose_tokens_have_other_contexts_are_not_ranked(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The runs have the same text and the same number of bytes per token."""
    titles: list[str] = []
    monkeypatch.setattr("llmtrain.compare.runs.draw_runs", lambda *given: titles.append(given[-1]))
    a, b = write(tmp_path, "a", 4.5), write(tmp_path, "b", 4.25, "data.packing=none")
    recipe = (a / "recipe.yaml").read_text()
    (a / "recipe.yaml").write_text(recipe.replace("  packing: packed\n", ""))  # as earlier versions wrote it
    assert (a / "recipe.yaml").read_text() != recipe
    _, output, _ = compared(capsys, a, b, "--out", tmp_path)
    _, first, _, warning, _ = output.splitlines()
    assert first.split()[0] == "a", "in the order given"
    assert "different contexts (data.packing is packed in a, and none in b)" in warning
    _, output, _ = compared(capsys, a, write(tmp_path, "c", 4.25), "--out", tmp_path)
    assert output.splitlines()[1].split()[0] == "c"
    for key, values in (("train.sequence_length", "128 in c, and 64"), ("train.document_mask", "False in c, and True")):
        folder = tmp_path / key
        other = write(folder, "d", 4.0, "train.sequence_length=128", f"{key}={values.rpartition(' ')[2].lower()}")
        _, output, _ = compared(capsys, write(folder, "c", 4.25, "train.sequence_length=128"), other, "--out", folder)
        assert f"different contexts ({key} is {values} in d)" in output
        assert titles[-1] == f"validated on different contexts ({key}): not comparable"


@pytest.mark.parametrize(
    ("keys", "tokenizer", "ratio", "key"),
    [
        ((), "{}", 3.0, None),
        (("data.source=copy/of/it.txt",), "{}", 3.0, None),
        (("data.source=copy/of/it.txt",), "{}", 3.001, "data.source"),
        (("data.source=copy/of/it.txt",), "other", 3.0, "data.source"),
        (("eval.tokens=400",), "{}", 3.0, "eval.tokens"),
        (("data.validation_fraction=0.2",), "{}", 3.1, "data.validation_fraction"),
        (("data.validation=valid.txt",), "{}", 3.1, "data.validation"),
        (("data.max_tokens=5000", "data.cache_dir=elsewhere"), "{}", 3.05, None),
        ((), "{}", 3.1, RATIO),
        ((), "other", 3.1, None),
    ],
    ids=[
        "same",
        "copy",
        "other text",
        "copy and tokenizer",
        "tokens",
        "fraction",
        "a file",
        "other keys",
        "edited",
        "tokenizer",
    ],
)
def test_which_texts_are_the_same(tmp_path: Path, keys: tuple[str, ...], tokenizer: str, ratio: float, key) -> None:
    """Texts at different paths count as the same if they have the same number of bytes per token with one tokenizer."""
    first = read_validated_text(write(tmp_path, "a", 4.0), lines_of(4.0, 3.0))
    path = write(tmp_path, "b", 4.0, *keys, tokenizer=tokenizer)
    assert first.differing_key(read_validated_text(path, lines_of(3.7, ratio))) == key


def test_a_text_of_its_own_is_known_by_its_path(tmp_path: Path) -> None:
    texts = [
        read_validated_text(
            write(tmp_path, name, 4.0, f"data.source={name}.txt", "data.validation=valid.txt"), lines_of(4.0, ratio)
        )
        for name, ratio in (("a", 3.0), ("b", 3.05), ("edited", 3.1))
    ]
    assert texts[0].differing_key(texts[1]) is None
    assert common_unit([("a", texts[0]), ("b", texts[2])]).note == (
        "validated on different texts (bytes per token of the validation text is 3.0 in a, and 3.1 in b): "
        "losses can't be compared, and runs are not ranked"
    )


def test_without_a_copy_tokenizers_are_those_of_the_recipes(tmp_path: Path) -> None:
    paths = [write(tmp_path, "a", 4.0), write(tmp_path, "b", 4.0, OTHER)]
    for path in paths:
        (path / "tokenizer" / "tokenizer.json").unlink()
    texts = [(path.name, read_validated_text(path, ())) for path in paths]
    assert common_unit(texts).tag == "eval/bpb" and common_unit([texts[0], texts[0]]).tag == "eval/loss"


def test_a_run_of_which_nothing_is_known_is_like_the_others(tmp_path: Path) -> None:
    path = write(tmp_path, "a", 4.0)
    (tmp_path / "old").mkdir()
    (tmp_path / "old/recipe.yaml").write_text(yaml.safe_dump({"data": None, "eval": 3}))
    texts = [(name, read_validated_text(tmp_path / name, ())) for name in ("old", "a")]
    assert path.exists() and common_unit(texts).note == ""
