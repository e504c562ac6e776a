"""Tests of sources: every kind gives its documents, splits are disjoint, and errors have one line."""

from __future__ import annotations

import gzip
import json
import os
import sysconfig
from collections.abc import Iterator
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest

from llmtrain.config import DataSection
from llmtrain.data import sources
from llmtrain.data.sources import Position, TextStream, documents, fingerprint
from llmtrain.data.token_files import find_token_files
from llmtrain.errors import DataError, UnavailableError

STORIES = [f"Story {i}.\n\nThe {i} cats sat." for i in range(40)]


def write_jsonl(path: Path, texts: list[str | None], key: str = "text") -> Path:
    raw = "\n".join(json.dumps({"id": i, key: text}) for i, text in enumerate(texts)).encode()
    path.write_bytes(gzip.compress(raw) if path.suffix == ".gz" else raw)
    return path


def write_parquet(path: Path, texts: list[str | None], key: str = "text") -> Path:
    pyarrow.parquet.write_table(pyarrow.table({"id": range(len(texts)), key: texts}), path, row_group_size=7)
    return path


def read(source: Path | str, **keys: object) -> list[str]:
    data = DataSection(source=str(source), **keys)
    return list(documents(data, "train")) + list(documents(data, "validation"))


def test_txt_is_cut_at_the_separator_stripped_and_empties_dropped(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_text("\n<|endoftext|>\n".join(["", *STORIES, "  \n", "", "last"]))
    assert sorted(read(path)) == sorted([*STORIES, "last"])
    path.write_text("one\n---\ntwo")
    assert sorted(read(path, separator="---")) == ["one", "two"]
    assert read(path, separator=None) == ["one\n---\ntwo"]
    path.write_bytes(b"\xef\xbb\xbfone\r\n\r\ntwo")  # as on Windows
    for separator in ("\n\n", "\r\n\r\n"):
        assert sorted(read(path, separator=separator)) == ["one", "two"]


def test_txt_separator_across_read_chunks(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    first = "x" * ((1 << 20) - 5)
    path.write_text(f"{first}<|endoftext|>second")
    assert sorted(read(path)) == ["second", first]


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz", "a.json.gz", "a.parquet"])
def test_rows_of_text_skip_null_and_blank(tmp_path: Path, name: str) -> None:
    write = write_parquet if name.endswith("parquet") else write_jsonl
    path = write(tmp_path / name, [*STORIES, None, " \n"], key="body")
    assert sorted(read(path, text_key="body")) == sorted(STORIES)
    with pytest.raises(DataError, match=r"no column data\.text_key=text; it has id, body"):
        read(path)


def test_json_lines_may_have_empty_ones_between_them(tmp_path: Path) -> None:
    path = tmp_path / "text.jsonl"
    path.write_text('{"text": "first"}\n\n{"text": "second"}\n')
    data = DataSection(source=str(path), validation=str(path))
    assert list(documents(data, "train")) == ["first", "second"]
    path.write_text('{"text": "first"}\n["second"]\n')
    with pytest.raises(DataError, match=r"text\.jsonl:2: expected a JSON object per line, found a list"):
        list(documents(data, "train"))


def test_folder_is_sorted_mixed_and_without_hidden_files(tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    (tmp_path / ".cache").mkdir()
    write_jsonl(tmp_path / "b.jsonl", ["from b"])
    write_parquet(tmp_path / "sub" / "c.parquet", ["from c"])
    (tmp_path / "a.txt").write_text("from a")
    (tmp_path / ".cache" / "x.txt").write_text("hidden")
    (tmp_path / "README.md").write_text("not data")
    data = DataSection(source=str(tmp_path), validation=str(tmp_path / "b.jsonl"))
    assert list(documents(data, "train")) == ["from a", "from c"]
    assert list(documents(data, "validation")) == ["from b"]
    assert list(documents(data.model_copy(update={"validation": None, "validation_fraction": 1e-9}), "train")) == [
        "from a",
        "from b",
        "from c",
    ]
    same = DataSection(source=str(tmp_path / "b.jsonl"), validation=f"{tmp_path}/./b.jsonl")
    with pytest.raises(DataError, match=r"has all files of data\.source"):
        list(documents(same, "train"))


def test_held_out_documents_depend_on_their_text_alone(tmp_path: Path) -> None:
    def splits(texts: list[str]) -> tuple[set[str], set[str]]:
        data = DataSection(source=str(write_jsonl(tmp_path / "a.jsonl", texts)), validation_fraction=0.3)
        return set(documents(data, "train")), set(documents(data, "validation"))

    many = [f"document {i}" for i in range(2000)]
    train, validation = splits(many)
    assert not train & validation and train | validation == set(many)
    assert 0.26 < len(validation) / len(many) < 0.34
    assert splits(many[::-1]) == (train, validation)


def test_half_a_surrogate_pair_becomes_a_replacement(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "bad \\ud83d end"}')
    assert read(tmp_path / "a.jsonl") == ["bad ? end"]


def test_stdlib_is_source_code_without_tests() -> None:
    data = DataSection(source="stdlib", validation_fraction=0.05)
    train, validation = set(documents(data, "train")), set(documents(data, "validation"))
    root = Path(sysconfig.get_path("stdlib"))
    assert (root / "json" / "decoder.py").read_text("utf-8") in train | validation
    assert validation and not train & validation
    tests = root / "test" / "test_json" / "test_decode.py"
    assert not tests.exists() or tests.read_text("utf-8") not in train | validation
    assert sum(map(len, train)) > 3_000_000
    assert list(documents(data, "train")) == list(documents(data, "train"))


def test_an_interpreter_without_its_librarys_sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("llmtrain.data.python_files.stdlib_root", lambda: tmp_path)
    with pytest.raises(DataError, match=r"stdlib: no \.py files in .*; use data\.source=/path/to/files"):
        list(documents(DataSection(source="stdlib"), "train"))
    (tmp_path / "latin.py").write_bytes("# -*- coding: latin-1 -*-\n# \xe9t\xe9".encode("latin-1"))
    (tmp_path / "plain.py").write_text("answer = 42\n" * 20)
    read = [*documents(DataSection(source="stdlib"), "train"), *documents(DataSection(source="stdlib"), "validation")]
    assert read == ["answer = 42\n" * 20], "a file in another encoding is skipped"


def test_fingerprint_follows_files_and_python_version(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a.txt"
    path.write_text("one")
    data = DataSection(source=str(path))
    before = fingerprint(data)
    assert fingerprint(data) == before
    monkeypatch.chdir(tmp_path)
    assert fingerprint(DataSection(source="a.txt")) == before
    path.write_text("other")
    assert fingerprint(data) != before
    stdlib = fingerprint(DataSection(source="stdlib"))
    monkeypatch.setattr("platform.python_version", lambda: "3.99.0")
    assert fingerprint(DataSection(source="stdlib")) != stdlib


def test_a_hub_source_is_known_by_its_name_subset_and_splits() -> None:
    data = DataSection(source="hf:owner/name", subset="small")
    assert fingerprint(data) == fingerprint(data.model_copy())
    for change in ({"source": "hf:owner/other"}, {"subset": "large"}, {"split": "test"}, {"validation": "dev"}):
        assert fingerprint(data.model_copy(update=change)) != fingerprint(data), change


def test_bad_sources_are_named_in_one_line(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "a.csv").write_text("text\n")
    (tmp_path / "latin.txt").write_bytes(b"caf\xe9")
    (tmp_path / "bad.jsonl").write_text('{"text": "a"}\n{"text": ')
    (tmp_path / "digits.jsonl").write_text('{"text": "a", "id": ' + "1" * 5000 + "}")
    (tmp_path / "deep.jsonl").write_text('{"text": "a"}\n{"text": "a", "tree": ' + "[" * 200_000)
    (tmp_path / "list.jsonl").write_text("[1]")
    (tmp_path / "number.jsonl").write_text('{"text": 3}')
    (tmp_path / "bad.parquet").write_bytes(b"not parquet")
    pyarrow.parquet.write_table(pyarrow.table({"text": [["a"]] * 3000}), tmp_path / "lists.parquet")
    pyarrow.parquet.write_table(pyarrow.table({"text": [None] * 1500 + [["a"]] * 9}), tmp_path / "late.parquet")
    write_jsonl(tmp_path / "cut.jsonl.gz", STORIES)
    (tmp_path / "cut.jsonl.gz").write_bytes((tmp_path / "cut.jsonl.gz").read_bytes()[:-20])
    for name, message in {
        "nothing": r"data\.source: .*nothing: no such file or folder; expected stories, stdlib, python, a path, or hf:",
        "empty": r"empty: no text in this folder; expected files that end in \.txt, \.txt\.gz, \.jsonl",
        "a.csv": r"a\.csv: unknown kind of file; expected \.txt, \.txt\.gz",
        "latin.txt": r"latin\.txt: not UTF-8",
        "bad.jsonl": r"bad\.jsonl:2: not JSON",
        "digits.jsonl": r"digits\.jsonl:1: not JSON \(Exceeds the limit",
        "deep.jsonl": r"deep\.jsonl:2: not JSON \(.*recursion",
        "list.jsonl": r"list\.jsonl:1: expected a JSON object per line, found a list",
        "number.jsonl": r"number\.jsonl:1: data\.text_key=text holds a number, expected text",
        "bad.parquet": r"bad\.parquet: can't be read as parquet",
        "lists.parquet": r"lists\.parquet: row 1: data\.text_key=text holds a list, expected text",
        "late.parquet": r"late\.parquet: row 1,501: data\.text_key=text holds a list, expected text",
        "cut.jsonl.gz": r"cut\.jsonl\.gz: damaged gzip file",
    }.items():
        with pytest.raises(DataError, match=message) as caught:
            read(tmp_path / name)
        assert "\n" not in str(caught.value)
    with pytest.raises(
        DataError, match=r"data\.validation: .*nothing: no such file or folder; expected a file or folder$"
    ):
        read("stdlib", validation=str(tmp_path / "nothing"))


def test_an_error_behind_the_first_document_says_what_a_correction_means(tmp_path: Path) -> None:
    """After a correction, all files are tokenized anew, which may take days."""
    (tmp_path / "a.jsonl").write_text('{"text": "a"}\n')
    (tmp_path / "b.jsonl").write_text('{"text": 5}\n')
    anew = "holds a number, expected text; after a correction, all files of this text are tokenized anew"
    for start in (0, 1):
        with pytest.raises(DataError, match=rf"b\.jsonl:1: data\.text_key=text {anew}$"):
            list(TextStream(DataSection(source=str(tmp_path)), "data.source", Position(documents=start)))
    with pytest.raises(DataError, match=r"holds a number, expected text$"):
        read(tmp_path / "b.jsonl")
    (tmp_path / "b.jsonl").unlink()
    (tmp_path / "b.jsonl").symlink_to("/proc/self/mem")  # this can't be read at its beginning
    with pytest.raises(UnavailableError, match=r"b\.jsonl: can't be read .*look at its permissions and its disk$"):
        read(tmp_path)


def test_text_that_is_skipped_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Reading up to a later start can take longer than a run waits for progress."""
    monkeypatch.setattr(sources, "SKIPPED_DOCUMENTS", 10)
    data = DataSection(source=str(write_jsonl(tmp_path / "a.jsonl", [f"text {n}" for n in range(40)])))
    for start, expected, reported in (
        (0, 40, []),
        (9, 31, []),
        (25, 15, [10, 20]),
        (40, 0, [10, 20, 30, 40]),
        (99, 0, [10, 20, 30, 40]),
    ):
        skipped: list[int] = []
        stream = TextStream(data, "data.source", Position(documents=start), skipped.append)
        assert (len(list(stream)), skipped) == (expected, reported)


def test_linked_folders_are_read_each_once(tmp_path: Path) -> None:
    for name in ("text/sub", "elsewhere/more", "elsewhere/.hidden"):
        (tmp_path / name).mkdir(parents=True)
        (tmp_path / name / "a.txt").write_text(f"from {name}")
    (tmp_path / "text" / "linked").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "text" / "again").symlink_to("sub")
    (tmp_path / "text" / "sub" / "around").symlink_to(tmp_path / "text")
    assert read(tmp_path / "text") == ["from elsewhere/more", "from text/sub"]
    (tmp_path / "tokens").mkdir()
    (tmp_path / "tokens" / "linked").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "elsewhere" / "more" / "a.txt").rename(tmp_path / "elsewhere" / "more" / "a.bin")
    assert find_token_files(str(tmp_path / "tokens"), "data.source", (".txt",)) == [
        tmp_path / "tokens/linked/more/a.bin"
    ]


def test_a_folder_that_can_not_be_listed_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a.txt").write_text("words")
    (tmp_path / "locked").mkdir()
    scandir = os.scandir

    def refuse(path: str) -> Iterator[os.DirEntry]:
        if str(path).endswith("/locked"):
            raise PermissionError(13, "Permission denied", path)
        return scandir(path)

    monkeypatch.setattr(os, "scandir", refuse)
    with pytest.raises(
        DataError, match=r"data.source: .*/locked can't be read \(Permission denied\); give a folder of text"
    ):
        read(tmp_path)


@pytest.mark.parametrize("name", ["a.txt", "a.jsonl"])
def test_a_disk_that_fails_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    def fails(*_: object, **__: object) -> None:
        raise OSError(5, "Input/output error")

    (tmp_path / name).write_text("{}")
    monkeypatch.setattr(Path, "open", fails)
    monkeypatch.setattr("builtins.open", fails)
    with pytest.raises(DataError, match=rf"{name}: can't be read \(Input/output error\)"):
        read(tmp_path / name)


def test_a_hub_that_breaks_off_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def rows(*_: object, **__: object) -> Iterator[dict[str, str]]:
        yield {"text": "one"}
        raise ConnectionResetError("connection reset by peer")

    monkeypatch.setattr("llmtrain.data.hub.require_on_hub", lambda *_, **__: None)
    monkeypatch.setattr("datasets.load_dataset", rows)
    texts = documents(DataSection(source="hf:o/d", validation_fraction=0.001), "train")
    assert next(texts) == "one"
    line = r"hf:o/d: reading it from the hub failed \(connection reset by peer\); .* split train alone and give .* as data\.source$"
    with pytest.raises(DataError, match=line):
        next(texts)
