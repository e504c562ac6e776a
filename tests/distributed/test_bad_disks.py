"""Tests of disks that fill up, become read-only or lose bits, and of clocks that jump, in runs of two ranks: every rank ends with
the reason, no earlier file is lost, and the run continues to the same metrics once the disk works again."""

from __future__ import annotations

import errno
import itertools
import json
import os
import shutil
import socket
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from llmtrain.config import Recipe
from llmtrain.errors import DONE, DataError, TrainingError
from llmtrain.files import LOCK_HOLDER, write_lock_holder
from llmtrain.parallel.comms import Comms
from llmtrain.parallel.world import World
from llmtrain.run_files import complete_checkpoints
from llmtrain.train import checkpoint_files, loggers
from llmtrain.train.checkpoint_files import FORMAT, CheckpointWriter, find_corruption, latest_valid, read_state
from llmtrain.train.checkpoint_reader import read_metadata
from llmtrain.train.loggers import JsonlLogger
from llmtrain.train.run import run_training
from llmtrain.train.trainer import Trainer
from tests.distributed.pool import RankPool
from tests.distributed.real_engine import mesh_of
from tests.distributed.reshard_runs import Part, Seen, fit, recipe_of, trainer_of, write_texts
from tests.end_to_end.runs import exact_lines, lines_of
from tests.mounts import mounted, read_only
from tests.unit.test_checkpoint_state import Training

KEYS = ("train.steps=12", "checkpoint.every=3", "checkpoint.keep=9", "log.every=2", "sync.warmup_steps=2")
NEEDS_ROOT = pytest.mark.skipif(os.geteuid() != 0, reason="mounting needs root")
Meddle = Callable[[Trainer, Recipe], None]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("disks")
    write_texts(folder)
    return folder


@pytest.fixture(scope="module")
def whole(ranks: RankPool, folder: Path) -> list[dict]:
    """Provide the metrics of an undisturbed run."""
    recipe = recipe_of(folder, "whole", *KEYS)
    assert ranks.run(train, recipe, nothing, world_size=2) == ["done", "done"]
    return exact_lines(folder / "runs/whole")


def train(recipe: Recipe, meddle: Meddle) -> str:
    """Train from the run's newest checkpoint on. Return how the run ended on this rank: "done", or the error."""
    trainer = trainer_of(Part(recipe, 2, 1, recipe.train.total_steps + 1), Seen())
    trainer.metrics.stop.requested, trainer.recipe = False, recipe
    trainer.checkpointer.section = recipe.checkpoint
    meddle(trainer, recipe)
    try:
        return fit(trainer)
    except (TrainingError, DataError) as error:
        return f"{type(error).__name__}: {error}"
    finally:
        trainer.method.close()


def nothing(trainer: Trainer, recipe: Recipe) -> None:
    return None


def after_step(trainer: Trainer, chosen: int, do: Callable[[], object]) -> None:
    """Call `do` on the main rank after a step, once the checkpoints so far are on the disk."""
    end_step = trainer.method.end_step

    def wrapped(step: int, tokens: int) -> None:
        end_step(step, tokens)
        if step == chosen and trainer.metrics.mesh.is_main:
            trainer.checkpointer.wait()
            do()

    trainer.method.end_step = wrapped


def fill_disk(trainer: Trainer, recipe: Recipe) -> None:
    """Fill the disk after step 7, except for a little."""

    def fill() -> None:
        room = os.statvfs(recipe.run.out_dir)
        Path(recipe.run.out_dir, "others").write_bytes(bytes(room.f_bavail * room.f_frsize - 20_000))

    after_step(trainer, 7, fill)


def steps_of(run: Path) -> list[int]:
    """Return the steps of a run's checkpoints, and check that all of them are whole."""
    for path in complete_checkpoints(run / "checkpoints").values():
        assert find_corruption(path, read_state(path)["files"]) is None
    return list(complete_checkpoints(run / "checkpoints"))


@NEEDS_ROOT
def test_a_full_disk_ends_all_ranks_with_the_reason_and_loses_nothing(
    ranks: RankPool, folder: Path, whole: list[dict]
) -> None:
    disk = folder / "disk"
    with mounted(disk, ["-t", "tmpfs", "-o", "size=30m", "tmpfs"]):
        recipe = recipe_of(folder, "full", *KEYS, f"run.out_dir={disk}")
        first, second = ranks.run(train, recipe, fill_disk, world_size=2)
        assert first == second and "\n" not in first
        assert first.startswith(f"TrainingError: {disk}/full/checkpoints/step-00000009 could not be written: "), first
        assert steps_of(disk / "full") == [3, 6]
        assert not list((disk / "full/checkpoints").glob("*.tmp"))
        (disk / "others").unlink()
        assert ranks.run(train, recipe, nothing, world_size=2) == ["done", "done"]
        assert steps_of(disk / "full") == [3, 6, 9, 12] and exact_lines(disk / "full") == whole


def take_over(trainer: Trainer, recipe: Recipe) -> None:
    """Take over the run after step 7, like another process that has got the lock."""
    after_step(trainer, 7, lambda: (Path(recipe.run.out_dir) / "taken" / LOCK_HOLDER).write_text("process 7 on other"))


def test_a_run_that_another_process_has_taken_over_ends(ranks: RankPool, folder: Path) -> None:
    recipe, run = recipe_of(folder, "taken", *KEYS), folder / "runs/taken"
    run.mkdir(parents=True)
    write_lock_holder(run)
    first, second = ranks.run(train, recipe, take_over, world_size=2)
    assert first == second and "step-00000009 could not be written: process 7 on other works in" in first
    assert steps_of(run) == [3, 6]


def write_unevenly(folder: Path, step: int, numbers: int) -> str:
    """Write a checkpoint of which rank 1 has all but one number. Return why it could not be written, or ""."""
    rank, comms = dist.get_rank(), Comms(dist.group.WORLD)
    tensors = {f"rank{rank}": torch.full((numbers if rank else 1,), float(step))}
    writing = CheckpointWriter(
        folder / f"step-{step:08d}", tensors, {"format": FORMAT, "step": step}, {}, comms, lambda: None
    )
    writing.start(in_thread=True)
    try:
        writing.wait(200)
    except TrainingError as error:
        return str(error)
    return ""


@NEEDS_ROOT
def test_a_disk_that_is_full_for_one_rank_is_so_for_all(ranks: RankPool, tmp_path: Path) -> None:
    with mounted(tmp_path, ["-t", "tmpfs", "-o", "size=256k", "tmpfs"]):
        assert ranks.run(write_unevenly, tmp_path, 10, 1000, world_size=2) == ["", ""]
        first, second = ranks.run(write_unevenly, tmp_path, 20, 200_000, world_size=2)
        assert first == second and "step-00000020 could not be written: " in first
        assert [path.name for path in complete_checkpoints(tmp_path).values()] == ["step-00000010"] and not list(
            tmp_path.glob("*.tmp")
        )
        assert ranks.run(write_unevenly, tmp_path, 30, 1000, world_size=2) == ["", ""], "the disk has room again"


def digests_fail(folder: Path, error: Exception) -> tuple[str, float]:
    """Write a checkpoint of which rank 1 can't read back its share of the files. Return the error and the seconds it took."""
    digests, began = checkpoint_files.digests, time.monotonic()
    if dist.get_rank() == 1:
        checkpoint_files.digests = partial(refused, error)
    try:
        return write_unevenly(folder, 10, 1000), time.monotonic() - began
    finally:
        checkpoint_files.digests = digests


def refused(error: Exception, *arguments: Any) -> Any:
    raise error


@pytest.mark.parametrize("error", [OSError(errno.EIO, "Input/output error"), RuntimeError("out of threads")])
def test_a_file_that_one_rank_cannot_read_back_is_told_to_all_at_once(
    ranks: RankPool, tmp_path: Path, error: Exception
) -> None:
    (first, took), (second, also_took) = ranks.run(digests_fail, tmp_path, error, world_size=2, timeout=240)
    assert first == second and f"step-00000010 could not be written: {error};" in first
    assert max(took, also_took) < 100, "no collective may wait for its 120 s"
    assert not list(tmp_path.iterdir())


def write_apart(folder: Path) -> str:
    return write_unevenly(folder / f"host{dist.get_rank()}", 10, 1000)


def test_a_checkpoint_without_the_files_of_a_rank_is_none(ranks: RankPool, tmp_path: Path) -> None:
    """The host of the rank does not share the folder."""
    there, elsewhere = (f"{tmp_path}/host{rank}/step-00000010.tmp on {socket.gethostname()}" for rank in (0, 1))
    for error in ranks.run(write_apart, tmp_path, world_size=2):
        assert (
            f"could not be written: {there} has no file of rank 1, which wrote to {elsewhere}; all nodes need" in error
        )
    assert not complete_checkpoints(tmp_path / "host0")


def files_of(folder: Path, local_size: int) -> tuple[list[str], list[str], str]:
    """Write a checkpoint with `local_size` ranks per host. Return the files that this rank reads back after the checkpoint, those
    that it reads back at the next start, and the file of the tensors that replicas share."""
    read, digest = [], checkpoint_files._xxh3
    rank, mesh = dist.get_rank(), mesh_of(2, 1)
    mesh = replace(mesh, world=World(rank, 2, rank % local_size, local_size))
    training = Training(folder)
    training.checkpoints.mesh = mesh
    with patch.object(checkpoint_files, "_xxh3", lambda path: read.append(path.name) or digest(path)):
        training.save()
        training.checkpoints.wait()
        written = list(read)
        checkpoint = latest_valid(folder, mesh, lambda line: None)
    [shared] = {
        stored.relative_path
        for index, stored in read_metadata(checkpoint).storage_data.items()
        if index.fqn == "anchor.w"
    }
    return written, read[len(written) :], shared


@pytest.mark.parametrize(("local_size", "shared"), [(1, "__0_0.distcp"), (2, "__1_0.distcp")])
def test_what_a_rank_reads_back_it_has_written_and_the_first_host_writes_what_all_have(
    ranks: RankPool, tmp_path: Path, local_size: int, shared: str
) -> None:
    """If there is one host, its ranks share the work of writing what all have."""
    first, second = ranks.run(files_of, tmp_path, local_size, world_size=2)
    assert first == ([".metadata", "__0_0.distcp"], [".metadata", "__0_0.distcp"], shared)
    assert second == (["__1_0.distcp"], ["__1_0.distcp"], shared)


@NEEDS_ROOT
def test_checkpoints_that_become_read_only_end_all_ranks_and_stay(
    ranks: RankPool, folder: Path, whole: list[dict]
) -> None:
    run = folder / "runs/fixed"
    recipe = recipe_of(folder, "fixed", *KEYS)
    shutil.copytree(folder / "runs/whole", run)
    for step in (9, 12):
        shutil.rmtree(run / f"checkpoints/step-{step:08d}")
    (run / "recipe.yaml").unlink()
    checkpoints = run / "checkpoints"
    with read_only(checkpoints):
        first, second = ranks.run(train, recipe, nothing, world_size=2)
        assert first == second and "\n" not in first
        assert "step-00000009 could not be written: " in first and "Read-only file system" in first
    assert steps_of(run) == [3, 6]
    assert ranks.run(train, recipe, nothing, world_size=2) == ["done", "done"]
    assert steps_of(run) == [3, 6, 9, 12] and exact_lines(run) == whole


class Refusing(JsonlLogger):
    """Logger on a disk that takes no lines of steps 5 to 8."""

    def log(self, step: int, *values: Any) -> None:
        if 5 <= step <= 8:
            raise OSError(errno.EIO, "Input/output error")
        super().log(step, *values)


def refuse_lines(trainer: Trainer, recipe: Recipe) -> None:
    fit = trainer.fit

    def fitted() -> str:
        loggers.JsonlLogger = Refusing
        try:
            return fit()
        finally:
            loggers.JsonlLogger = JsonlLogger

    trainer.fit = fitted


def refuse_opening(trainer: Trainer, recipe: Recipe) -> None:
    if trainer.metrics.mesh.is_main:
        trainer.metrics.run_log.directory.metrics.mkdir()


def test_metrics_that_cannot_be_written_end_all_ranks_before_a_checkpoint_with_a_hole(
    ranks: RankPool, folder: Path, whole: list[dict]
) -> None:
    run, recipe = folder / "runs/lines", recipe_of(folder, "lines", *KEYS)
    first, second = ranks.run(train, recipe, refuse_lines, world_size=2)
    assert first == second
    assert first == (
        f"TrainingError: {run}/metrics.jsonl could not be written: [Errno 5] Input/output error; start the same command again to "
        "continue from the last checkpoint"
    )
    assert steps_of(run) == [3], "a checkpoint of step 6 would lack the metrics of step 6"
    assert ranks.run(train, recipe, nothing, world_size=2) == ["done", "done"]
    assert exact_lines(run) == whole
    rarely = recipe_of(folder, "rarely", *KEYS, "checkpoint.every=100")
    first, second = ranks.run(train, rarely, refuse_lines, world_size=2)
    assert first == second and "rarely/metrics.jsonl could not be written: [Errno 5]" in first
    assert steps_of(folder / "runs/rarely") == [], "the run must end at the next line"
    opened = recipe_of(folder, "opened", *KEYS)
    first, second = ranks.run(train, opened, refuse_opening, world_size=2)
    assert first == second and "opened/metrics.jsonl could not be written: [Errno 21] Is a directory" in first


def test_a_summary_that_cannot_be_written_fails_the_run_until_it_can(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The wait for loggers that finish in the background comes last, when no rank waits for the main rank."""
    waits = []

    class Slow(JsonlLogger):
        def wait(self) -> None:
            waits.append((dist.is_initialized(), (run / "summary.json").exists()))

    monkeypatch.setattr(loggers, "JsonlLogger", Slow)
    alone = ("parallel.replicas=1", "parallel.shards=1")
    recipe, run = recipe_of(folder, "summary", *KEYS, *alone), folder / "runs/summary"
    in_the_way = run / "summary.json.tmp"

    def obstruct(trainer: Trainer) -> None:
        in_the_way.mkdir()

    with pytest.raises(
        TrainingError, match=r"runs/summary can't be written: .*Is a directory: .*; start the same command"
    ):
        run_training(recipe, World(0, 1, 0, 1), obstruct)
    in_the_way.rmdir()
    assert steps_of(run) == [3, 6, 9, 12] and not (run / "summary.json").exists()
    assert run_training(recipe, World(0, 1, 0, 1)) == DONE
    assert json.loads((run / "summary.json").read_text())["stopped"] == "done"
    assert waits == [(False, False), (False, True)]


def search_first(trainer: Trainer, recipe: Recipe) -> None:
    trainer.metrics.run_log.io_errors._scan._thread.join()  # otherwise so short a run could end first


def test_a_flipped_bit_in_a_token_shard_ends_all_ranks_with_what_to_do(
    ranks: RankPool, folder: Path, whole: list[dict]
) -> None:
    recipe = recipe_of(folder, "bits", *KEYS, f"data.cache_dir={folder / 'other-data'}")
    assert ranks.run(train, recipe, nothing, world_size=2) == ["done", "done"]
    run = folder / "runs/bits"
    shutil.rmtree(run)
    [shard] = (folder / "other-data").glob("*/train-00000.npy")
    good = shard.read_bytes()
    shard.write_bytes(good[:5000] + bytes([good[5000] ^ 16]) + good[5001:])
    first, second = ranks.run(train, recipe, search_first, world_size=2)
    assert first == second and "\n" not in first
    assert first.startswith(f"DataError: {shard} on ") and " found, " in first and " expected; " in first
    assert first.endswith(f"delete {shard.parent} and start the same command again: it prepares the same tokens")
    shutil.rmtree(shard.parent)
    assert ranks.run(train, recipe, nothing, world_size=2) == ["done", "done"]
    assert shard.read_bytes() == good and exact_lines(run) == whole


def jump_back(trainer: Trainer, recipe: Recipe) -> None:
    """Start the clock some days before now, and let it go back by an hour each time that it is read."""
    hours = itertools.count()
    now = time.time()
    time.time = lambda: now - 1e6 - 3600.0 * next(hours)


def jump_and_train(recipe: Recipe) -> str:
    clock = time.time
    try:
        return train(recipe, jump_back)
    finally:
        time.time = clock


def test_a_clock_that_jumps_back_changes_nothing(ranks: RankPool, folder: Path, whole: list[dict]) -> None:
    keys = [key for key in KEYS if not key.startswith("checkpoint.keep")]
    run, recipe = folder / "runs/clock", recipe_of(folder, "clock", *keys, "checkpoint.keep=2")
    assert ranks.run(jump_and_train, recipe, world_size=2) == ["done", "done"]
    assert steps_of(run) == [9, 12] and exact_lines(run) == whole
    seconds = [line["seconds"] for line in lines_of(run)]
    assert seconds == sorted(seconds) and seconds[0] >= 0 and seconds[-1] < 600

    # Between the runs: the older checkpoint is of tomorrow, the newest of 1970, and a half-written one of next year.
    shutil.rmtree(run / "checkpoints/step-00000012")
    shutil.copytree(folder / "runs/whole/checkpoints/step-00000006", run / "checkpoints/step-00000006")
    half_written = run / "checkpoints/step-00000012.tmp"
    half_written.mkdir()
    now = time.time()
    for when, path in ((now + 86400, "step-00000006"), (0, "step-00000009"), (now + 3e7, "step-00000012.tmp")):
        for each in (*(run / "checkpoints" / path).rglob("*"), run / "checkpoints" / path):
            os.utime(each, (when, when))
    os.utime(run / "metrics.jsonl", (0, 0))
    assert steps_of(run) == [6, 9], "the newest must be last"
    assert ranks.run(jump_and_train, recipe, world_size=2) == ["done", "done"]
    assert not half_written.exists() and steps_of(run) == [9, 12] and exact_lines(run) == whole
