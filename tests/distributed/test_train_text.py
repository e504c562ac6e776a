"""Tests of runs that tokenize while they train: on several hosts, with waits for the text, and resumed."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from llmtrain.config import DataSection, Recipe
from llmtrain.data import background
from llmtrain.data.dataset import open_dataset
from llmtrain.data.prepare import cache_path, prepare
from llmtrain.data.stream import write_status
from llmtrain.errors import DONE, STOPPED_EARLY, DataError
from llmtrain.parallel.mesh import build_mesh
from llmtrain.parallel.world import World
from llmtrain.train.prepare_data import prepare_texts
from llmtrain.train.run import run_training
from llmtrain.train.train_text import TrainText, open_train_text
from llmtrain.train.trainer import Trainer
from tests.distributed.fake_engine import meeting_store
from tests.distributed.pool import RankPool
from tests.distributed.reshard_runs import write_texts
from tests.distributed.test_run_length import ALONE, alone
from tests.distributed.test_same_tokens import TEXTS
from tests.end_to_end.runs import exact, lines_of, wait_until

FIRST = 600
MANY = 10**9


@contextmanager
def small_blocks() -> Iterator[None]:
    with ExitStack() as stack:
        for name in ("order.FIRST_BLOCK", "prepare.FIRST_BLOCK", "stream.FIRST_BLOCK"):
            stack.enter_context(mock.patch(f"llmtrain.data.{name}", FIRST))
        stack.enter_context(mock.patch("llmtrain.data.order.LARGEST_BLOCK", 4 * FIRST))
        stack.enter_context(mock.patch("llmtrain.data.extend.BATCH_CHARACTERS", 1000))
        yield


def section(folder: Path, texts: list[str]) -> DataSection:
    folder.mkdir()
    (folder / "stories.txt").write_text("\n~~~\n".join(texts))
    keys = {"tokenizer": "train:320", "validation_fraction": 0.2, "cache_dir": str(folder / "cache")}
    return DataSection(source=str(folder / "stories.txt"), separator="\n~~~\n", shuffle="blocks", **keys)


@contextmanager
def on_two_hosts(data: DataSection, store: dist.Store, tokenizer: object) -> Iterator[TrainText]:
    """Yield the text of this rank, which is alone on its host. `tokenizer` replaces the background tokenizer."""
    mesh = build_mesh(
        World(dist.get_rank(), 2, 0, 1),
        torch.device("cpu"),
        replicas=2,
        shards=1,
        replica_backend="auto",
        timeout=timedelta(seconds=60),
        store=store,
    )
    run = SimpleNamespace(timeout_seconds=60.0)
    train = SimpleNamespace(total_steps=MANY, tokens_per_step=1)
    recipe = SimpleNamespace(data=data, run=run, train=train, eval=SimpleNamespace(tokens=100))
    with small_blocks(), mock.patch("llmtrain.train.train_text.BackgroundTokenizer", tokenizer):
        prepared = prepare(data, MANY, 100, first_block_only=True)
        with open_train_text(recipe, mesh, prepared) as text:
            yield text


def read_on_two_hosts(sections: list[DataSection], error: str | None) -> object:
    """Return the tokens for which this rank, alone on its host, has waited, or its error. The second host starts to
    tokenize when the first one waits for it, or then fails with `error`."""
    rank = dist.get_rank()
    store, data = meeting_store(), sections[rank]
    tokenized, first_waits = threading.Event(), store.clone()

    class InThread:
        problem = None

        def __init__(self, *_: object) -> None:
            self.thread = threading.Thread(target=self.work, daemon=True)

        def work(self) -> None:
            if rank == 1:
                first_waits.get("the first host waits")
                if error is not None:
                    write_status(cache_path(data), error=error)
                    return
            prepare(data, MANY, 100)
            tokenized.set()

        def __enter__(self) -> object:
            self.thread.start()
            return self

        def __exit__(self, *_: object) -> None:
            self.thread.join()

    with on_two_hosts(data, store, InThread) as text:
        try:
            text.tokens.wait_for(FIRST + 1)
            if rank == 0:
                tokenized.wait(60)  # the rest of its own text is tokenized
                threading.Thread(
                    target=lambda: (
                        wait_until(lambda: text.tokens.is_waiting(0.0), "does not wait"),
                        store.set("the first host waits", "1"),
                    )
                ).start()
            count = text.tokens.wait_for(MANY)
            return text.tokens.window(0, count).tolist()
        except DataError as found:
            return str(found)
        finally:
            dist.barrier()


def started_on_two_hosts(data: DataSection) -> tuple[int, list[str]]:
    """Return how many tokenizers this rank has started, and which files the choice of the host has left."""
    tokenizer = mock.MagicMock()
    with on_two_hosts(data, meeting_store(), tokenizer):
        dist.barrier()
        return tokenizer.call_count, [path.name for path in cache_path(data).glob("*.host")]


def test_hosts_that_see_one_folder_have_one_tokenizer(ranks: RankPool, tmp_path: Path) -> None:
    data = section(tmp_path / "a", TEXTS)
    assert ranks.run(started_on_two_hosts, data, world_size=2) == [(1, []), (0, [])]


def test_hosts_wait_for_one_another_and_read_the_same(ranks: RankPool, tmp_path: Path) -> None:
    sections = [section(tmp_path / name, TEXTS) for name in "ab"]
    one, other = ranks.run(read_on_two_hosts, sections, None, world_size=2)
    assert one == other and len(one) > 4000


def test_hosts_with_other_text_after_the_first_block_are_named_on_all(ranks: RankPool, tmp_path: Path) -> None:
    sections = [section(tmp_path / "a", TEXTS), section(tmp_path / "b", [*TEXTS[:300], *TEXTS[:300:-1]])]
    shared = prepare(sections[0], MANY, 100).directory / "tokenizer"
    sections = [
        data.model_copy(update={"tokenizer": str(shared), "cache_dir": data.cache_dir + "-own"}) for data in sections
    ]
    one, other = ranks.run(read_on_two_hosts, sections, None, world_size=2)
    for data, line in zip(sections, (one, other), strict=True):
        assert (
            line.startswith(f"{data.source}: ") and " has different tokens (" in line and "from token 1,800 on" in line
        )


def test_an_error_of_one_host_is_that_of_all(ranks: RankPool, tmp_path: Path) -> None:
    sections = [section(tmp_path / name, TEXTS) for name in "ab"]
    found = ranks.run(read_on_two_hosts, sections, "hf:o/d: the hub is gone", world_size=2)
    assert found == ["hf:o/d: the hub is gone"] * 2


# ---- runs


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("text")
    write_texts(folder)
    return folder


def streamed(folder: Path, name: str, *keys: str) -> Recipe:
    return alone(folder, name, "data.shuffle=blocks", "train.steps=12", "log.every=1", *keys)


@pytest.mark.deep
def test_a_run_that_waits_for_its_text_trains_as_one_that_has_it(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """This also holds if it stops in the middle of the text and continues when all of the text exists."""
    gate = folder / "gate"
    program = f"while [ ! -e {gate} ]; do sleep 0.02; done; exec {sys.executable} -m llmtrain.data.background"
    monkeypatch.setattr(background, "COMMAND", ("bash", "-c", program))
    monkeypatch.setattr("llmtrain.data.stream.QUIET_SECONDS", 0.0)
    slow = streamed(folder, "slow", f"data.cache_dir={folder / 'slow'}")

    def open_gate(trainer: Trainer) -> None:
        tokens = trainer.loader.loader.tokens
        assert not tokens.is_complete

        def watch() -> None:
            wait_until(lambda: tokens.is_waiting(0.0), "does not wait")
            gate.touch()

        threading.Thread(target=watch, daemon=True).start()
        trainer.after_step.append(
            lambda step: setattr(trainer.metrics.stop, "requested", trainer.metrics.stop.requested or step == 6)
        )

    with small_blocks():
        assert run_training(slow, ALONE, open_gate) == STOPPED_EARLY
        assert "waiting for the tokenizer of" in capfd.readouterr().err
        assert run_training(slow, ALONE) == DONE
        whole = streamed(folder, "whole", f"data.cache_dir={folder / 'whole'}")
        assert prepare_texts(whole, show_progress=False)[""].index.splits["train"].exhausted
        assert run_training(whole, ALONE, lambda trainer: None) == DONE
    assert open_dataset(cache_path(slow.data)).index.splits["train"].exhausted
    lines, expected = (
        {line["step"]: exact(line) for line in lines_of(folder / "runs" / name) if "train/loss" in line}
        for name in ("slow", "whole")
    )
    assert lines == expected and max(lines) == 12


def test_a_tokenizer_that_fails_ends_the_run_with_its_line(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = "read job; echo 'error: hf:o/d: the hub is gone' >&2; exit 2"
    monkeypatch.setattr(background, "COMMAND", ("bash", "-c", program))
    monkeypatch.setattr(background, "PAUSES", (0.0,))
    failing = streamed(folder, "failing", f"data.cache_dir={folder / 'failing'}")
    with small_blocks(), pytest.raises(DataError, match=r"^hf:o/d: the hub is gone \(attempt 3 "):
        run_training(failing, ALONE)
