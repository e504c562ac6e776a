"""Tests of tokenizing in several processes: the same tokens as in one process, ends that come early, and long documents."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import Future
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path

import numpy as np
import psutil
import pytest
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from llmtrain.config import DataSection
from llmtrain.data import extend as extending
from llmtrain.data import tokenizing
from llmtrain.data.dataset import TokenDataset, open_dataset
from llmtrain.data.prepare import cache_path, prepare
from llmtrain.data.sources import TextStream
from llmtrain.data.tokenizing import BatchTokenizer, processes_of
from llmtrain.errors import DataError, UnavailableError
from tests.end_to_end.runs import is_gone, wait_until
from tests.unit.test_data_damage import all_tokens
from tests.unit.test_data_prepare import TEXTS

MANY = 10**9
PREPARE = """
import sys
from llmtrain.config import DataSection
from llmtrain.data import extend, tokenizing
from llmtrain.data.prepare import prepare
from llmtrain.data.sources import TextStream
extend.BATCH_CHARACTERS, tokenizing.FIRST_BATCHES = 1000, 0
class Announced(TextStream):
    def __iter__(self):
        for number, found in enumerate(super().__iter__()):
            if number == 200:
                print("reading", flush=True)
                sys.stdin.read()
            yield found
extend.TextStream = Announced
if __name__ == "__main__":
    prepare(DataSection.model_validate_json(sys.argv[1]), 10**9, 10**9)
"""


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(extending, "BATCH_CHARACTERS", 1000)
    monkeypatch.setattr(tokenizing, "FIRST_BATCHES", 2)


@pytest.fixture
def data(tmp_path: Path) -> DataSection:
    (tmp_path / "stories.txt").write_text("\n~~~\n".join(TEXTS))
    keys = {"tokenizer": "train:320", "validation_fraction": 0.2, "cache_dir": str(tmp_path / "cache")}
    return DataSection(source=str(tmp_path / "stories.txt"), separator="\n~~~\n", num_proc=1, **keys)


def several(data: DataSection, number: int = 2) -> DataSection:
    return data.model_copy(update={"num_proc": number, "cache_dir": f"{data.cache_dir}-{number}"})


def files_of(prepared: TokenDataset) -> dict[str, bytes]:
    return {
        path.name: path.read_bytes() for path in (*prepared.directory.glob("*.npy"), prepared.directory / "index.json")
    }


def test_files_do_not_depend_on_the_number_of_processes(data: DataSection) -> None:
    """This holds for a text that is read completely, and for one that is read only as far as a run needs."""
    assert files_of(prepare(several(data), MANY, MANY)) == files_of(prepare(data, MANY, MANY))
    few = {"cache_dir": data.cache_dir + "-few", "max_tokens": 2000}
    alone = prepare(data.model_copy(update=few), 1, 700)
    assert not any(split.exhausted for split in alone.index.splits.values())
    assert files_of(prepare(several(data.model_copy(update=few)), 1, 700)) == files_of(alone)


@pytest.mark.deep
def test_what_ends_early_loses_nothing_and_goes_on_with_another_number(
    data: DataSection, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Broken(TextStream):
        def __iter__(self) -> Iterator[tuple[str, str]]:
            for number, found in enumerate(super().__iter__()):
                if number == 150:
                    raise DataError("the source has gone")
                yield found

    class Killed(BatchTokenizer):
        def _submit(self, batch: list[tuple[str, str]]) -> object:
            if self._batches == 12:
                victim = next(
                    child for child in psutil.Process().children() if "spawn_main" in " ".join(child.cmdline())
                )
                victim.kill()
                victim.wait()
            return super()._submit(batch)

    two, expected = several(data), prepare(data, MANY, MANY)
    with monkeypatch.context() as patch, pytest.raises(DataError, match="the source has gone"):
        patch.setattr(extending, "TextStream", Broken)
        prepare(two, MANY, MANY)
    index = open_dataset(cache_path(two)).index
    read = sum(split.documents for split in index.splits.values())
    assert read > 130, "the text that was read before the error is tokenized"
    with monkeypatch.context() as patch, pytest.raises(UnavailableError) as error:
        patch.setattr(extending, "BatchTokenizer", Killed)
        prepare(two, MANY, MANY)
    assert str(error.value) == (
        "data.num_proc=2: a process that tokenizes was killed, or could not start; start the same command again, with a smaller "
        "data.num_proc if memory is short"
    )
    index = open_dataset(cache_path(two)).index
    assert sum(split.documents for split in index.splits.values()) > read, "the tokens from before the kill are kept"
    prepared = prepare(two.model_copy(update={"num_proc": 1}), MANY, MANY)
    for split in ("train", "validation"):
        assert all_tokens(prepared, split) == all_tokens(expected, split)


def test_processes_end_with_the_one_that_started_them(data: DataSection) -> None:
    reader = subprocess.Popen(
        [sys.executable, "-c", PREPARE, several(data).model_dump_json()],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": os.getcwd()},
    )
    try:
        assert reader.stdout.readline() == b"reading\n"
        children = psutil.Process(reader.pid).children(recursive=True)
        assert len(children) >= 2
    finally:
        os.kill(reader.pid, signal.SIGKILL)
        reader.wait()
    wait_until(lambda: all(is_gone(child) for child in children), "processes are left")


def test_a_tokenizer_that_panics_is_one_line(data: DataSection, monkeypatch: pytest.MonkeyPatch) -> None:
    class PanicException(BaseException):
        pass

    def panic(*_: object) -> None:
        raise PanicException("no entry found for key")

    monkeypatch.setattr(tokenizing, "encode", panic)
    with pytest.raises(DataError, match=r"data.tokenizer: .*no entry found for key"):
        prepare(data, MANY, MANY)


def test_a_long_document_is_never_tokenized_as_a_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of all pieces but the last, only the ids are kept, because the tokenizers library's own objects take many times their memory."""
    backend = Tokenizer(models.WordLevel({"?": 0, "a": 1, "b": 2, "c": 3}, unk_token="?"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend)
    whole = [id_ for text in ("a b " * 252, "c") for id_ in [*tokenizer(text)["input_ids"], 0]]
    calls: list[int] = []

    def encode(given: object, pieces: list[str]) -> object:
        calls.append(sum(map(len, pieces)))
        return real(given, pieces)

    real = tokenizing.encode
    monkeypatch.setattr(tokenizing, "encode", encode)
    monkeypatch.setattr(tokenizing, "PIECE_CHARACTERS", 10)
    part = tokenizing.tokenize(tokenizer, [("train", "a b " * 252), ("train", "c")])["train"]
    assert calls == [80] * 12 + [49]
    assert [isinstance(ids, np.ndarray) for ids, _ in part.pieces] == [True] * 100 + [False] * 2
    assert part.ids(0).tolist() == whole and (part.tokens, part.documents, part.text_bytes) == (len(whole), 2, 1009)


def test_the_default_leaves_a_small_machine_to_one_process(monkeypatch: pytest.MonkeyPatch) -> None:
    for cores, expected in ((2, 1), (7, 1), (8, 2), (64, 16)):
        monkeypatch.setattr(tokenizing, "usable_cores", lambda cores=cores: cores)
        assert processes_of(None) == expected
    assert processes_of(3) == 3


def test_no_batch_is_kept_that_comes_after_one_that_failed() -> None:
    class Tokenizer(BatchTokenizer):
        """Tokenizer whose second batch fails once the third one is done."""

        killed: Future

        def _submit(self, batch: str) -> Future:
            found: Future = Future()
            if batch == "second":
                self.killed = found
            else:
                found.set_result(batch)
            if batch == "third":
                self.killed.set_exception(BrokenProcessPool())
            return found

    found: list[tuple[str, int]] = []
    with pytest.raises(UnavailableError, match="a process that tokenizes was killed"):
        found.extend(Tokenizer(None, 0, 2).in_order([("first", 1), ("second", 2), ("third", 3)]))
    assert found == [("first", 1)]
