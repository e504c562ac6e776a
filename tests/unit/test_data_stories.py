"""Tests of the stories in the package: their notice and license, that none was edited, and that no other text is
mistaken for them."""

from __future__ import annotations

import gzip
import hashlib
import os
from pathlib import Path

import pytest

from llmtrain.config import DataSection
from llmtrain.data.sources import STORIES_FILE, documents, fingerprint
from llmtrain.errors import DataError

SEPARATOR = "<|endoftext|>"
STORIES = DataSection(source="stories", validation_fraction=0.05)
AGREEMENT = "9e826cd126ad3f39340306f9455b5125da9b2e877689a9b950d56913a45ccaad"
"""SHA-256 of the text of the agreement in the SPDX license list."""
SHARED = Path(os.environ.get("LLMTRAIN_DATA", Path(__file__).parents[3] / "shared" / "data"))


def selected(text: str) -> list[str]:
    """Return the stories of `text` that the README.md beside the package's stories says are selected, in its order."""
    found = [story.strip() for story in text.split(SEPARATOR)]
    fitting = [
        story
        for story in found
        if story.startswith("Once upon a time") and story[-1] in '.!?"' and story.isascii() and len(story) <= 1000
    ]
    return sorted(fitting, key=lambda story: hashlib.blake2b(story.encode(), digest_size=8).digest())


def test_stories_are_cut_without_the_notice_and_split_without_overlap() -> None:
    train, validation = list(documents(STORIES, "train")), list(documents(STORIES, "validation"))
    assert len({*train, *validation}) == len(train) + len(validation) == 5269
    assert all(story.startswith("Once upon a time") and SEPARATOR not in story for story in train + validation)
    assert 0.04 < len(validation) / 5269 < 0.06
    other = STORIES.model_copy(update={"separator": None, "text_key": "body"})
    assert list(documents(other, "train")) == train, "keys for a user's own files do not matter"


def test_the_file_says_whose_it_is_and_the_license_lies_next_to_it() -> None:
    notice, *stories = gzip.decompress(STORIES_FILE.read_bytes()).decode("ascii").split(SEPARATOR)
    assert len(stories) == 5269
    for words in ("Ronen Eldan and Yuanzhi Li", "huggingface.co/datasets/roneneldan/TinyStories", "It was changed"):
        assert words in notice
    agreement = (STORIES_FILE.parent / "CDLA-Sharing-1.0.txt").read_bytes()
    assert agreement.decode().startswith("Community Data License Agreement – Sharing – Version 1.0\n")
    assert hashlib.sha256(agreement).hexdigest() == AGREEMENT, "its text may not be changed (3.3)"


def test_no_story_was_edited() -> None:
    original = SHARED / "tinystories" / "train.txt"
    if not original.is_file():
        pytest.skip(f"{original} is not here; LLMTRAIN_DATA names the folder of tinystories/train.txt")
    here = [story for split in ("train", "validation") for story in documents(STORIES, split)]
    chosen = selected(original.read_text(encoding="utf-8"))
    assert sorted(here) == sorted(chosen)
    notice, *stories = gzip.decompress(STORIES_FILE.read_bytes()).decode().split(f"{SEPARATOR}\n")
    assert [story.removesuffix("\n") for story in stories] == chosen and notice


def test_a_folder_of_the_same_name_is_not_passed_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    before = fingerprint(STORIES)
    (tmp_path / "stories").mkdir()
    (tmp_path / "stories" / "own.txt").write_text("My own story.")
    for look in (lambda: list(documents(STORIES, "train")), lambda: fingerprint(STORIES)):
        with pytest.raises(
            DataError, match=r"stories is this package's text, but also .* here; write \./stories for that"
        ):
            look()
    (tmp_path / "other.txt").write_text("Another story.")
    assert list(documents(DataSection(source="./stories", validation="other.txt"), "train")) == ["My own story."]
    (tmp_path / "stories").rename(tmp_path / "mine")
    assert fingerprint(STORIES) == before


def test_tokens_of_the_stories_serve_every_copy_of_the_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = fingerprint(STORIES)
    copy = tmp_path / "elsewhere.txt.gz"
    copy.write_bytes(STORIES_FILE.read_bytes())
    monkeypatch.setattr("llmtrain.data.sources.STORIES_FILE", copy)
    assert fingerprint(STORIES) == before
    copy.write_bytes(gzip.compress(b"notice" + SEPARATOR.encode() + b"one story"))
    assert fingerprint(STORIES) != before
    assert list(documents(STORIES.model_copy(update={"validation_fraction": 1e-9}), "train")) == ["one story"]


def test_compressed_text_is_read_and_a_damaged_file_named(tmp_path: Path) -> None:
    path = tmp_path / "a.txt.gz"
    path.write_bytes(gzip.compress(f"one\n{SEPARATOR}\ntwo\n".encode()))
    data = DataSection(source=str(path), validation=str(path))
    assert list(documents(data, "train")) == list(documents(data, "validation")) == ["one", "two"]
    path.write_bytes(path.read_bytes()[:-9])
    with pytest.raises(DataError, match=r"a\.txt\.gz: damaged gzip file \(.*\); copy it again"):
        list(documents(data, "train"))
