"""Text of `data.source: python`: files that are read, packages that are held out, and differences between machines."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Callable
from itertools import islice
from pathlib import Path

import pytest

from docs.python_packages import required_packages
from llmtrain.config import DataSection
from llmtrain.data.prepare import cache_path, prepare
from llmtrain.data.python_files import LIBRARY, PINNED, PackageRecord, PythonText, package_named
from llmtrain.data.sources import Position, TextStream, documents, fingerprint
from llmtrain.errors import DataError

Install = Callable[..., None]
PACKAGES = [f"llmtrain-test-{letter}" for letter in "abcdefgh"]


def source_of(package: str, number: int) -> str:
    return f"# {package}, file {number}\nvalue = {number}\n"


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Install:
    """Return a function that installs a package, as pip does, from its files' names and contents."""
    site = tmp_path / "site"
    monkeypatch.syspath_prepend(str(site))

    def install(name: str, files: dict[str, bytes], version: str = "1.0") -> None:
        module, info = name.replace("-", "_"), site / f"{name.replace('-', '_')}.dist-info"
        info.mkdir(parents=True, exist_ok=True)
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
        lines = []
        for file, content in files.items():
            path = site / module / file
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)
            digest = base64.urlsafe_b64encode(hashlib.sha256(content).digest()).decode().rstrip("=")
            lines.append(f"{module}/{file},sha256={digest},{len(content)}")
        (info / "RECORD").write_text("\n".join(lines) + "\n")

    return install


@pytest.fixture
def text(install: Install, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[], PythonText]:
    """Install eight packages of ten files each as the text of `python`, and return a function that looks it up."""
    for package in PACKAGES:
        install(package, {f"{i}.py": source_of(package, i).encode() for i in range(10)})
    pinned = tmp_path / "packages.txt"
    pinned.write_text("".join(f"{package_named(name).record}\n" for name in PACKAGES))

    def look_up() -> PythonText:
        return PythonText(pinned)

    for module in ("sources", "prepare"):
        monkeypatch.setattr(f"llmtrain.data.{module}.python_text", look_up)
    return look_up


def test_a_package_of_validation_never_occurs_in_training(text: Callable[[], PythonText]) -> None:
    data = DataSection(source="python", validation_fraction=0.3)
    train, validation = list(documents(data, "train")), list(documents(data, "validation"))
    packages = [{line.split()[1] for line in split} for split in (train, validation)]
    assert len(packages[1]) == 2 and not packages[0] & packages[1], "two of eight are at most 30 %"
    assert sorted(train + validation) == sorted(source_of(name, i) for name in PACKAGES for i in range(10))
    assert list(documents(data, "train")) == train
    assert {name for name in PACKAGES if f"{name}," in str(validation)} == text().validation_packages(0.3)


def test_packages_are_mixed_so_that_a_part_of_the_text_has_all_of_them(text: Callable[[], PythonText]) -> None:
    first = [name for name, _ in islice(text().documents(), 30)]
    assert len(set(first)) == len(PACKAGES)


def test_what_is_held_out_does_not_depend_on_the_versions_installed(
    text: Callable[[], PythonText], install: Install
) -> None:
    before = text().validation_packages(0.3)
    for name in before:
        install(name, {"0.py": b"x = 1\n" * 1000}, version="2.0")
    assert text().validation_packages(0.3) == before


def test_tests_blank_files_other_encodings_and_repetitions_are_left_out(
    text: Callable[[], PythonText], install: Install
) -> None:
    kept = {"kept.py": b"kept = 1\n", "testing.py": b"kept = 2\n"}
    left_out = {
        "tests/test_it.py": b"test = 1\n",
        "test/it.py": b"test = 2\n",
        "blank.py": b" \n",
        "latin.py": "# -*- coding: latin-1 -*-\n# été".encode("latin-1"),
        "data.txt": b"not Python\n",
        "same.py": source_of(PACKAGES[3], 3).encode(),
    }
    install(PACKAGES[0], kept | left_out)
    found = [content for _, content in text().documents()]
    assert {content.decode() for content in kept.values()} <= set(found)
    assert len(found) == len(set(found)) == 7 * 10 + len(kept)
    train, validation = (list(documents(DataSection(source="python"), split)) for split in ("train", "validation"))
    assert not set(train) & set(validation)


def test_reading_continues_at_a_position(text: Callable[[], PythonText]) -> None:
    data = DataSection(source="python", validation_fraction=0.3)
    whole = list(TextStream(data, "data.source"))
    assert list(TextStream(data, "data.source", Position(documents=33))) == whole[33:]


def test_a_given_validation_text_leaves_all_packages_for_training(
    text: Callable[[], PythonText], tmp_path: Path
) -> None:
    (tmp_path / "own.txt").write_text("own text")
    data = DataSection(source="python", validation=str(tmp_path / "own.txt"), validation_fraction=0.3)
    assert len(list(documents(data, "train"))) == 80
    assert list(documents(data, "validation")) == ["own text"]


def test_two_machines_can_tell_whether_they_have_the_same_text(
    text: Callable[[], PythonText], install: Install, tmp_path: Path
) -> None:
    data = DataSection(source="python", tokenizer="train:300", cache_dir=str(tmp_path / "tokens"))
    pinned = text()
    assert "80 files of 8 packages, 0.0 MB" in pinned.line(0.3) and "; as pinned; " in pinned.line(0.3)
    assert sorted(text().validation_packages(0.3)) == pinned.line(0.3).rpartition("validation: ")[2].split(", ")
    changed = PACKAGES[2]
    files = {f"{i}.py": source_of(changed, i).encode() for i in range(10)}
    same_size = files | {"0.py": source_of(changed, 9).encode()}
    for install_change, difference in {
        lambda: install(changed, same_size): f"{changed} 1.0 with other files",
        lambda: install(changed, files, version="1.1"): f"{changed} 1.1 instead of 1.0",
        lambda: install(changed, {"data.txt": b""}): f"{changed} is missing",
    }.items():
        before = fingerprint(data), cache_path(data), text().line(0.3)
        install_change()
        after = fingerprint(data), cache_path(data), text().line(0.3)
        assert not [pair for pair in zip(before, after, strict=True) if pair[0] == pair[1]]
        assert f"; not as pinned: {difference}; " in after[2]
    install(changed, files)
    assert text().record == pinned.record


def test_the_packages_are_on_record_beside_their_tokens(
    text: Callable[[], PythonText], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = DataSection(
        source="python", tokenizer="train:300", cache_dir=str(tmp_path / "tokens"), validation_fraction=0.3
    )
    prepared = prepare(data, 100, 50, show_progress=True)
    record = (prepared.directory / "packages.txt").read_text()
    assert [PackageRecord.parse(line) for line in record.splitlines()] == text().records
    assert capsys.readouterr().out.splitlines()[0] == text().line(0.3)


def test_no_package_and_a_folder_of_that_name_are_one_line(
    text: Callable[[], PythonText], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "packages.txt").write_text("llmtrain-test-nothing==1.0 1 1 0\n")
    with pytest.raises(DataError, match=r"data\.source: python: no package of .* is installed; use data\.source="):
        list(documents(DataSection(source="python"), "train"))
    (tmp_path / "python").mkdir()
    with pytest.raises(
        DataError, match=r"python is the installed packages' text, but also .* here; write \./python for that"
    ):
        list(documents(DataSection(source="python"), "train"))


def test_the_pinned_packages_are_those_that_llmtrain_requires() -> None:
    real = PythonText()
    names = {pin.name for pin in real.pinned}
    assert names <= {*required_packages(), LIBRARY}, f"{PINNED.name} is old: python -m docs.python_packages"
    installed = {record.name: record for record in real.records}
    assert not [name for name in required_packages() if name not in names and package_named(name).files]
    same = [pin for pin in real.pinned if pin.name in installed and installed[pin.name].version == pin.version]
    assert len(same) > 50 and [installed[pin.name] for pin in same] == same
    assert sum(pin.bytes for pin in real.pinned) > 190e6
