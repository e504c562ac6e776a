from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from itertools import groupby
from operator import attrgetter
from pathlib import Path

import pytest

from tests import mutation
from tests.mutants import MUTANTS, TABLES, Mutant
from tests.mutants.mutant import SCENARIOS, read

ROOT = Path(__file__).parents[2]


def belongs(module: str, file: str) -> bool:
    """Return whether a file's mutants belong in a module: `sync_m_to_z` has those of `llmtrain/sync/method.py`."""
    base, first, last = re.fullmatch(r"(.+?)(?:_([a-z])_to_([a-z]))?", module).groups()
    *folders, name = Path(file).parts
    folder = "_".join(folders[1:] or folders)
    return folder == base and first <= name[0] <= last if first else f"{folder}_".startswith(f"{base}_")


def test_a_table_is_where_its_source_file_leads() -> None:
    places = [(module, file) for module, tables in TABLES.items() for file in tables]
    assert not [place for place in places if not belongs(*place)]
    assert len({file for _, file in places}) == len(places)


def test_tables_are_read() -> None:
    table = r"""
    seen by unit/test_a.py, SCENARIOS
        one line
          - a = "\n"
          + a = b
        several lines
          deep: it needs a scheduler
          -     if a:
          -
          -         b ␣
          +     pass␣
    seen by unit/test_b.py::test_c
        taken out
          equivalent: it is a comment
          - - a
          -
    """
    assert list(read("llmtrain/a.py", table)) == [
        Mutant("one line", "llmtrain/a.py", r'a = "\n"', "a = b", ("tests/unit/test_a.py", *SCENARIOS)),
        Mutant(
            "several lines",
            "llmtrain/a.py",
            "    if a:\n\n        b  ",
            "    pass ",
            ("tests/unit/test_a.py", *SCENARIOS),
            deep="it needs a scheduler",
        ),
        Mutant(
            "taken out", "llmtrain/a.py", "- a\n", "", ("tests/unit/test_b.py::test_c",), equivalent="it is a comment"
        ),
    ]


def test_an_area_names_a_part_and_folders_that_exist() -> None:
    parts = {path.relative_to(ROOT / "llmtrain").parts[0] for path in (ROOT / "llmtrain").rglob("*.py")}
    assert set(mutation.AREAS) <= parts
    folders = {folder for folders in (*mutation.AREAS.values(), mutation.ELSEWHERE) for folder in folders}
    assert not [folder for folder in folders if not any((ROOT / folder).glob("test_*.py"))]


def test_an_unknown_area_is_refused(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("sys.argv", ["mutation", "--area", "sync,tarin"])
    with pytest.raises(SystemExit):
        mutation.parsed()
    assert "tarin" in capsys.readouterr().err


def test_every_mutant_applies_exactly_once() -> None:
    counts = {mutant.name: (ROOT / mutant.file).read_text().count(mutant.old) for mutant in MUTANTS}
    assert not {name: count for name, count in counts.items() if count != 1}
    assert not [mutant.name for mutant in MUTANTS if mutant.old == mutant.new]


by_file = attrgetter("file")


def with_many_at_once(text: str, mutants: list[Mutant]) -> Iterator[tuple[str, list[str]]]:
    """Yield texts of a file, each with as many mutants as do not overlap, and the names of these mutants. Parsing one text
    per mutant would take 4 seconds."""
    while mutants:
        changed, end, here, later = "", 0, [], []
        for mutant in sorted(mutants, key=lambda mutant: text.index(mutant.old)):
            first = text.index(mutant.old)
            if first < end:
                later.append(mutant)
                continue
            changed += text[end:first] + mutant.new
            end = first + len(mutant.old)
            here.append(mutant.name)
        yield changed + text[end:], here
        mutants = later


def test_many_mutants_at_once_are_in_one_text_unless_they_overlap() -> None:
    mutants = [Mutant(old, "file", old, old.upper(), ()) for old in ("cd", "a", "bc", "e")]
    assert list(with_many_at_once("abcde", mutants)) == [("ABCdE", ["a", "bc", "e"]), ("abCDe", ["cd"])]


def test_every_mutant_is_python() -> None:
    """A mutant that is not Python fails any test that imports it, whether or not the test sees the mistake."""
    for file, tables in groupby(sorted(MUTANTS, key=by_file), key=by_file):
        if file.endswith(".py"):
            for text, names in with_many_at_once((ROOT / file).read_text(), list(tables)):
                ast.parse(text, ", ".join(names))


def test_mutants_have_names_of_their_own_and_tests_that_exist() -> None:
    assert len({mutant.name for mutant in MUTANTS}) == len(MUTANTS) >= 200
    tests = {test.partition("::")[0] for mutant in MUTANTS for test in mutant.tests}
    assert not [test for test in tests if not (ROOT / test).is_file()]
    assert all(mutant.tests for mutant in MUTANTS)
