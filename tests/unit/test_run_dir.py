"""Tests of the run directory: its lock, its files, and the recipes that may continue its run."""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
import socket
import subprocess
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import pytest

from llmtrain import files, waiting
from llmtrain.cli import main
from llmtrain.errors import RecipeError, TrainingError, UnavailableError, UserError
from llmtrain.files import LOCK_HOLDER
from llmtrain.parallel.mesh import Mesh
from llmtrain.recipe_loader import check_not_moved, load_recipe
from llmtrain.train import run_dir
from llmtrain.train.mirror import RemoteRun
from llmtrain.train.run_dir import RunDirectory, lock_folder
from tests.unit.test_waiting import PrintingTimer

HERE = socket.gethostname()
ROOT = Path(__file__).resolve().parents[2]


def test_a_run_of_another_recipe_is_told_in_a_few_words(tmp_path: Path):
    """Another method changes many keys. Those that its preset sets are not listed."""
    file, keys = ROOT / "recipes/edit_llama_stdlib.yaml", [f"run.out_dir={tmp_path}", "run.name=a"]
    RunDirectory(load_recipe(file, keys)).claim()
    at = re.escape(f"{tmp_path}/a")
    for method, other in (("diloco", "lr"), ("muloco", "weight_decay")):
        said = f'sync.method: "edit" there, "{method}" here, and what follows from it; optim.{other}:'
        with pytest.raises(RecipeError, match=rf"^{at} holds .* \({said}[^;]+\); choose another run.name$"):
            RunDirectory(load_recipe(file, [*keys, f"sync.method={method}", f"optim.{other}=0.5"])).check_recipe()
    (tmp_path / "a/checkpoints/step-00000004").mkdir(parents=True)
    (tmp_path / "a/checkpoints/step-00000004/state.json").touch()
    many = [f"optim.{key}=0.5" for key in ("lr", "weight_decay", "clip_norm", "eps")]
    many += ["run.seed=9", "train.sequence_length=64"]
    with pytest.raises(
        RecipeError, match=rf"\(([^;]*; ){{5}}and 1 more\); choose another run.name, with model.from_weights={at} to"
    ):
        RunDirectory(load_recipe(file, [*keys, *many])).check_recipe()
    with pytest.raises(RecipeError, match=r"4 there, 3 here\); choose another run.name$"):
        RunDirectory(load_recipe(file, [*keys, "model.config.num_hidden_layers=3"])).check_recipe()


def test_a_complete_run_says_what_is_left_of_it(tmp_path: Path):
    recipe = load_recipe(ROOT / "recipes/edit_llama_stdlib.yaml", [f"run.out_dir={tmp_path}", "train.steps=40"])
    directory = RunDirectory(recipe)
    directory.claim()
    directory.write_summary({"stopped": "done", "steps": 40, "final_eval_loss": 3.0})
    said = [directory.completed_message()]
    for step in (24, 40):
        (directory.checkpoints / f"step-{step:08}").mkdir(parents=True)
        (directory.checkpoints / f"step-{step:08}/state.json").touch()
        said.append(directory.completed_message())
    lost, older, whole = (
        line.partition("loss 3.0000. ")[2].removesuffix("; start another with run.name=NAME.") for line in said
    )
    assert lost == "It no longer has a checkpoint, so it can neither be trained longer nor exported"
    assert older == "Its newest checkpoint is of step 24, so a run with more train.steps would continue there"
    assert whole == "Train it longer with more train.steps, such as train.steps=80"


def test_a_runs_tokenizer_is_copied_whole_and_kept_from_its_first_checkpoint_on(tmp_path: Path):
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache/tokenizer.json").write_text("first")
    directory = RunDirectory(
        load_recipe(ROOT / "recipes/edit_llama_stdlib.yaml", [f"run.out_dir={tmp_path}", "run.name=a"])
    )
    directory.claim()
    (tmp_path / "a/tokenizer.tmp").mkdir()  # left by an interrupted copy
    (tmp_path / "a/tokenizer.tmp/half").touch()
    directory.copy_tokenizer(tmp_path / "cache")
    assert [path.name for path in (tmp_path / "a").glob("tokenizer*")] == ["tokenizer"]
    copy = tmp_path / "a/tokenizer"
    (tmp_path / "cache/tokenizer.json").write_text("second")
    directory.copy_tokenizer(tmp_path / "cache")
    assert [(path.name, path.read_text()) for path in copy.iterdir()] == [("tokenizer.json", "second")]
    (directory.checkpoints / "step-00000004").mkdir(parents=True)
    (directory.checkpoints / "step-00000004/state.json").touch()
    (tmp_path / "cache/tokenizer.json").write_text("third")
    directory.copy_tokenizer(tmp_path / "cache")
    assert [(path.name, path.read_text()) for path in copy.iterdir()] == [("tokenizer.json", "second")]


def test_two_processes_never_train_in_one_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """The second process would delete the checkpoint that the first one is writing."""
    monkeypatch.setattr(run_dir, "PATIENCE_SECONDS", 0.2)
    recipe = load_recipe(ROOT / "recipes/edit_llama_stdlib.yaml", [f"run.out_dir={tmp_path}", "run.name=a"])
    first = RunDirectory(recipe)
    first.claim()
    (tmp_path / "a/checkpoints/step-00000003.tmp").mkdir(parents=True)
    with pytest.raises(
        RecipeError, match=rf"^process {os.getpid()} on \S+ works in .*/a; wait until it has ended, or choose another"
    ):
        RunDirectory(recipe).claim()
    assert (tmp_path / "a/checkpoints/step-00000003.tmp").exists()
    del first  # releases the lock, as the end of its process does
    RunDirectory(recipe).claim()
    assert not (tmp_path / "a/checkpoints/step-00000003.tmp").exists()


@pytest.mark.parametrize("other", ["host", "kernel"])
def test_a_lock_of_another_host_is_waited_for_longer_and_may_be_free_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], other: str
):
    """The server of a network file system keeps a lost host's lock for a while. Kubernetes gives the pod that replaces a lost one
    the same host name, but the kernel's boot id differs."""
    monkeypatch.setattr(run_dir, "PATIENCE_SECONDS", 0.0)
    monkeypatch.setattr(run_dir, "PATIENCE_WITH_OTHER_HOSTS", 0.2)
    monkeypatch.setattr(waiting, "QUIET_SECONDS", 0.01)
    monkeypatch.setattr("threading.Timer", PrintingTimer)
    held = lock_folder(tmp_path, "")
    if other == "host":
        monkeypatch.setattr("socket.gethostname", lambda: "survivor")
    else:
        (tmp_path / "boot_id").write_text("5678\n")
        monkeypatch.setattr(files, "BOOT_ID", tmp_path / "boot_id")
    with pytest.raises(
        TrainingError,
        match=rf"^process {os.getpid()} on \S+ works in {tmp_path}, or its host was lost; start .* delete \S+/.lock$",
    ):
        lock_folder(tmp_path, "choose another")
    *_, line = capsys.readouterr().err.splitlines()
    assert line == f"waiting for process {os.getpid()} on {HERE}, which works in {tmp_path} or was lost (at most 0.2 s)"
    held.release()
    lock_folder(tmp_path, "")


def test_every_rank_hears_that_the_directory_is_locked_by_another_host():
    def fail() -> None:
        raise TrainingError("process 7 on lost works here")

    ranks = SimpleNamespace(broadcast_object=lambda answer, what: answer)
    with pytest.raises(TrainingError, match="process 7 on lost"):
        Mesh.broadcast_from_main(SimpleNamespace(is_main=True, all_ranks=ranks), fail)
    ranks.broadcast_object = lambda answer, what: TrainingError("process 7 on lost works here")
    with pytest.raises(TrainingError, match="process 7 on lost"):
        Mesh.broadcast_from_main(SimpleNamespace(is_main=False, all_ranks=ranks), fail)


def refuse_if_moved(stored: Path, overrides: list[str]) -> None:
    check_not_moved(load_recipe(stored, overrides), stored, overrides)


def test_the_folder_of_a_runs_mirror_is_not_one_that_was_moved(tmp_path: Path):
    keys = ["run.name=a", f"run.out_dir={tmp_path}/runs", f"checkpoint.mirror=file://{tmp_path}"]
    RemoteRun(f"file://{tmp_path}/a").write_recipe(load_recipe(ROOT / "recipes/edit_llama_stdlib.yaml", keys))
    (tmp_path / "a/checkpoints").mkdir()
    refuse_if_moved(tmp_path / "a/recipe.yaml", [])


def test_a_renamed_folder_is_continued_under_its_new_name_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    keys = [f"run.out_dir={tmp_path}", "data.source=/no/text"]
    directory = RunDirectory(load_recipe(ROOT / "recipes/edit_llama_stdlib.yaml", [*keys, "run.name=a"]))
    directory.claim()
    directory.close()
    (tmp_path / "a/checkpoints").mkdir()
    (tmp_path / "a").rename(tmp_path / "b")
    stored = tmp_path / "b/recipe.yaml"
    for command in (["train"], ["launch"], ["recipe", "check"]):
        with pytest.raises(SystemExit):
            main([*command, str(stored)])
        assert capsys.readouterr().err == (
            f"error: {stored} is of the run a, but its folder is b; give run.name=b to continue the run in this folder, or run.name=a to "
            "start a run of that name\n"
        )
    refuse_if_moved(stored, ["run.name=a"])
    RunDirectory(load_recipe(stored, ["run.name=b"])).check_recipe()
    with pytest.raises(RecipeError, match=r"another recipe \(optim\.lr: 0\.0\d+ there, 0\.5 here\)"):
        RunDirectory(load_recipe(stored, ["run.name=b", "optim.lr=0.5"])).check_recipe()
    (tmp_path / "b").rename(tmp_path / "a")
    refuse_if_moved(tmp_path / "a/recipe.yaml", [])


def test_a_folder_that_was_renamed_and_copied_elsewhere_is_continued_there(tmp_path: Path):
    """The advice names both keys, because with run.name alone, a start would train in the folder that was copied."""
    keys = [f"run.out_dir={tmp_path}/runs", "run.name=a", "data.source=/no/text"]
    RunDirectory(load_recipe(ROOT / "recipes/edit_llama_stdlib.yaml", keys)).claim()
    (tmp_path / "runs/a").rename(tmp_path / "runs/b")
    (tmp_path / "runs/b/checkpoints").mkdir()
    shutil.copytree(tmp_path / "runs/b", tmp_path / "copy/b")
    stored = tmp_path / "copy/b/recipe.yaml"
    with pytest.raises(RecipeError, match=rf"; give run\.name=b run\.out_dir={tmp_path}/copy to continue"):
        refuse_if_moved(stored, [])
    with pytest.raises(RecipeError, match=rf"another folder now; give run\.out_dir={tmp_path}/copy to continue"):
        refuse_if_moved(stored, ["run.name=b"])
    refuse_if_moved(stored, ["run.name=b", f"run.out_dir={tmp_path}/copy"])
    refuse_if_moved(stored, ["run.name=c"])


def test_a_moved_folder_is_continued_in_its_new_place_alone(tmp_path: Path):
    (tmp_path / "runs").mkdir()
    keys = [f"run.out_dir={tmp_path}/runs", "run.name=a", "data.source=/no/text"]
    directory = RunDirectory(load_recipe(ROOT / "recipes/edit_llama_stdlib.yaml", keys))
    directory.claim()
    directory.close()
    (tmp_path / "runs/a/checkpoints").mkdir()
    (tmp_path / "runs/a").rename(tmp_path / "a")
    stored = tmp_path / "a/recipe.yaml"
    with pytest.raises(
        RecipeError, match=rf"of a run in run\.out_dir={tmp_path}/runs, .* give run\.out_dir={tmp_path} to cont"
    ):
        refuse_if_moved(stored, [])
    refuse_if_moved(stored, [f"run.out_dir={tmp_path}"])
    refuse_if_moved(stored, ["run.name=b"])
    (tmp_path / "runs").rmdir()
    (tmp_path / "runs").symlink_to(tmp_path)
    refuse_if_moved(stored, [])


def test_a_run_that_is_killed_has_no_summary_of_the_time_before(tmp_path: Path):
    """Readers of summary.json take a run that has this file for ended."""
    directory = RunDirectory(
        load_recipe(ROOT / "recipes/edit_llama_stdlib.yaml", [f"run.out_dir={tmp_path}", "run.name=a"])
    )
    directory.claim()
    directory.write_summary({"stopped": "signal", "final_eval_loss": float("nan"), "warnings": []})
    assert directory.summary() == {"stopped": "signal", "final_eval_loss": None, "warnings": []}
    directory.write_summary(
        {"stopped": "error", "texts": {"a": {"eval_loss": float("inf"), "epochs": 1.5}}, "list": (1, [float("nan")])}
    )
    assert directory.summary() == {
        "stopped": "error",
        "texts": {"a": {"eval_loss": None, "epochs": 1.5}},
        "list": [1, [None]],
    }
    directory.claim()  # the run is started again, and killed
    assert directory.summary() is None and not (tmp_path / "a/summary.json").exists()


@pytest.mark.skipif(os.geteuid() != 0, reason="mounting a small disk needs root")
def test_a_disk_that_is_full_at_the_start_is_one_line_and_costs_no_file(tmp_path: Path):
    mount = ["mount", "-t", "tmpfs", "-o", "size=128k", "tmpfs", str(tmp_path)]
    mounted = subprocess.run(mount, capture_output=True)
    if mounted.returncode:
        pytest.skip(f"no small disk here: {mounted.stderr.decode().strip()}")
    try:
        keys = [f"run.out_dir={tmp_path}", "run.name=a"]
        directory = RunDirectory(load_recipe(ROOT / "recipes/edit_llama_stdlib.yaml", keys))
        directory.claim()
        directory.write_summary({"stopped": "signal"})
        recipe = (tmp_path / "a/recipe.yaml").read_text()
        fill(tmp_path / "others")
        with pytest.raises(
            RecipeError, match=r"run\.out_dir: .*/a can't be written \(No space left on device\); make room"
        ):
            directory.claim()
        assert (tmp_path / "a/recipe.yaml").read_text() == recipe and directory.summary() == {"stopped": "signal"}
        directory.check_recipe()
        (tmp_path / "tokenizer").mkdir()
        with pytest.raises(RecipeError, match=r"run\.out_dir: .*No space left on device"):
            (tmp_path / "others").unlink()
            (tmp_path / "tokenizer/tokenizer.json").write_bytes(bytes(70_000))
            directory.copy_tokenizer(tmp_path / "tokenizer")
        (tmp_path / "tokenizer/tokenizer.json").unlink()

        (tmp_path / "a/checkpoints/step-00000005").mkdir(parents=True)
        (tmp_path / "a/checkpoints/step-00000005/state.json").write_text("{}")
        fill(tmp_path / "others")
        with pytest.raises(
            UnavailableError, match=r"No space left on device\); make room, then start the same command again"
        ):
            directory.claim()  # the run has a checkpoint, so it can continue when there is room again
        (tmp_path / "others").unlink()
        shutil.rmtree(tmp_path / "a/checkpoints")

        directory.close()
        # A run that was killed after it had filled the disk leaves such a folder.
        half_written = tmp_path / "a/checkpoints/step-00000010.tmp"
        half_written.mkdir(parents=True)
        (tmp_path / "a" / LOCK_HOLDER).unlink()
        fill(half_written / "__0_0.distcp")
        directory = RunDirectory(directory.recipe)
        directory.claim()
        assert directory.summary() is None and list((tmp_path / "a/checkpoints").iterdir()) == []
    finally:
        subprocess.run(["umount", "--lazy", str(tmp_path)], check=True)


def fill(path: Path) -> None:
    """Fill the rest of the disk with one file."""
    with path.open("wb", buffering=0) as file, suppress(OSError):
        while file.write(bytes(4096)):
            pass


def test_curves_over_steps_that_are_trained_again_are_set_aside(tmp_path: Path) -> None:
    directory = RunDirectory(load_recipe(ROOT / "recipes/edit_llama_stdlib.yaml", [f"run.out_dir={tmp_path}"]))
    (results := directory.path / "eval").mkdir(parents=True)
    for name, steps in {"long": (10, 30), "short": (10, 20)}.items():
        checkpoints = [{"checkpoint_step": step} for step in steps]
        (results / f"{name}-over-time.json").write_text(json.dumps({"suite": name, "checkpoints": checkpoints}))
        (results / f"{name}-over-time.png").touch()
    directory.set_aside_after(20)
    short = ["short-over-time.json", "short-over-time.png"]
    assert sorted(path.name for path in results.iterdir()) == [
        "long-over-time.json.old",
        "long-over-time.png.old",
        *short,
    ]


def test_the_batch_may_change_and_the_learning_rate_with_it(tmp_path: Path) -> None:
    file, keys = ROOT / "recipes/edit_llama_stdlib.yaml", [f"run.out_dir={tmp_path}", "run.name=a"]
    RunDirectory(load_recipe(file, keys)).claim()
    RunDirectory(load_recipe(file, [*keys, "train.global_batch=64", "optim.lr=0.5"])).check_recipe()
    with pytest.raises(RecipeError, match=r"another recipe \(optim.lr: .* there"):
        RunDirectory(load_recipe(file, [*keys, "optim.lr=0.5"])).check_recipe()


def test_a_start_that_failed_before_its_first_checkpoint_does_not_bind_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The learning rate may change with the length since the newest checkpoint, of which the failed start has trained nothing."""
    file, keys = ROOT / "recipes/edit_llama_stdlib.yaml", [f"run.out_dir={tmp_path}", "run.name=a", "train.tokens=null"]
    trained = load_recipe(file, [*keys, "train.steps=100"])
    RunDirectory(load_recipe(file, [*keys, "train.steps=200", "optim.lr=0.5"])).claim()
    state = {"recipe": trained.model_dump(mode="json"), "step": 50}
    monkeypatch.setattr(RunDirectory, "newest_state", lambda self: state)
    RunDirectory(load_recipe(file, [*keys, "train.steps=200", "optim.lr=0.25"])).check_recipe()
    with pytest.raises(RecipeError, match=r"another recipe \(optim.lr: .* there, 0.5 here"):
        RunDirectory(load_recipe(file, [*keys, "train.steps=100", "optim.lr=0.5"])).check_recipe()


@pytest.mark.parametrize(
    "key", ["parallel.activation_checkpointing=true", "parallel.loss_chunk=64", "sync.offload=true"]
)
def test_what_saves_memory_may_change_when_a_run_continues(tmp_path: Path, key: str) -> None:
    """A user whose run was out of memory is advised to set such keys."""
    keys = [f"run.out_dir={tmp_path}", "run.name=a"]
    RunDirectory(load_recipe(ROOT / "recipes/edit_llama_stdlib.yaml", keys)).claim()
    RunDirectory(load_recipe(ROOT / "recipes/edit_llama_stdlib.yaml", [*keys, key])).check_recipe()


@pytest.mark.parametrize(
    ("number", "kind"),
    [
        (errno.ESTALE, UnavailableError),
        (errno.EIO, UnavailableError),
        (errno.ETIMEDOUT, UnavailableError),
        (errno.EACCES, RecipeError),
    ],
    ids=lambda value: errno.errorcode.get(value),
)
@pytest.mark.parametrize(
    ("fails", "work"),
    [
        ("pathlib.Path.read_text", RunDirectory.summary),
        ("pathlib.Path.read_text", RunDirectory.finished_summary),
        ("llmtrain.recipe_loader.OmegaConf.load", RunDirectory.check_recipe),
        ("llmtrain.train.run_dir.write_lock_holder", RunDirectory.lock),
        ("llmtrain.train.run_dir.atomic_write", RunDirectory.claim),
        ("shutil.copyfile", lambda directory: directory.copy_tokenizer(directory.path / "cache")),
    ],
    ids=["summary", "finished", "check_recipe", "lock", "claim", "copy_tokenizer"],
)
def test_a_disk_that_does_not_answer_is_no_fault_of_the_run(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    fails: str,
    work: Callable[[RunDirectory], object],
    number: int,
    kind: type[UserError],
) -> None:
    """Launchers try again only after an UnavailableError. Its message must not ask to delete a file, which may be intact."""
    recipe = load_recipe(ROOT / "recipes/edit_llama_stdlib.yaml", [f"run.out_dir={tmp_path}"])
    before, directory = RunDirectory(recipe), RunDirectory(recipe)
    before.claim()
    before.close()
    before.write_summary({"stopped": "signal"})
    (directory.path / "cache").mkdir()
    (directory.path / "cache/tokenizer.json").touch()
    monkeypatch.setattr(fails, Mock(side_effect=OSError(number, os.strerror(number))))
    with pytest.raises(UserError, match=os.strerror(number) if kind is UnavailableError else None) as caught:
        work(directory)
    assert type(caught.value) is kind and ("delete" in str(caught.value)) <= (kind is RecipeError)


def test_a_summary_that_a_start_has_just_deleted_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory = RunDirectory(load_recipe(ROOT / "recipes/edit_llama_stdlib.yaml", [f"run.out_dir={tmp_path}"]))
    monkeypatch.setattr(Path, "exists", lambda path: True)
    assert directory.summary() is None
