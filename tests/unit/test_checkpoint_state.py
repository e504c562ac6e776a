"""Tests of the content of checkpoints: the state at a step, random number generators included, whatever training does
during the write."""

from __future__ import annotations

import errno
import json
import threading
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch
import torch.nn.functional as F

from llmtrain.config import CheckpointSection
from llmtrain.errors import RecipeError
from llmtrain.parallel.comms import Comms
from llmtrain.parallel.engine import Block
from llmtrain.parallel.world import World
from llmtrain.recipe_loader import load_recipe
from llmtrain.reshard import own_step
from llmtrain.run_files import STATE_FILE, step_name
from llmtrain.train.checkpoint import Checkpointer
from llmtrain.train.checkpoint_files import CheckpointWriter, dump_state, read_state

ROOT = Path(__file__).parents[2]
ALONE = SimpleNamespace(rank=0, size=1)
MESH = SimpleNamespace(
    world=World(0, 1, 0, 1),
    replicas=1,
    replica_comms=ALONE,
    shard_comms=ALONE,
    device=torch.device("cpu"),
    checkpoint_group=Comms(None),
    all_ranks=Comms(None),
    is_main=True,
)


class Training:
    """One rank with a weight, its moments, an anchor and dropout; each step changes all of them in place."""

    def __init__(self, folder: Path, background: bool = True, mesh: SimpleNamespace = MESH):
        self.weight, self.moments, self.anchor = torch.zeros(50), torch.zeros(50), torch.zeros(50)
        engine = SimpleNamespace(
            blocks=[Block("all", [self.weight], ["w"])],
            returns_copies=False,
            state_dict=lambda keep: {"weights.w": keep(self.weight), "optimizer.w.moments": keep(self.moments)},
            load_state_dict=lambda state: None,  # the checkpoint is read into the tensors themselves
            to_dtensors=lambda block, flat: {"w": flat},
            from_dtensors=lambda block, tensors: tensors["w"],
        )
        method = SimpleNamespace(
            shared_state=lambda: {"anchor": [self.anchor]},
            per_replica_state=dict,
            validated_blocks=lambda: None,
            state_dict=dict,
            reshard_rules=dict,
            load_state_dict=lambda state, tensors: self.anchor.copy_(tensors["anchor"][0]),
        )
        section = CheckpointSection(every=1, background=background)
        self.folder, self.checkpoints = folder, Checkpointer(folder, mesh, engine, method, section, 30.0)

    def step(self) -> None:
        self.weight += F.dropout(torch.ones(50))
        self.moments.lerp_(self.weight, 0.5)
        self.anchor -= 1.0

    def tensors(self) -> list[torch.Tensor]:
        return [tensor.clone() for tensor in (self.weight, self.moments, self.anchor)]

    def save(self) -> None:
        self.checkpoints.save(1, lambda: {"step": 1})

    def load(self, seed: int = 0) -> None:
        self.checkpoints.wait()
        self.checkpoints.load(self.folder / step_name(1), {"step": own_step}, seed)


def test_a_checkpoint_is_of_its_step_though_training_goes_on_while_it_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    go, run = threading.Event(), CheckpointWriter._run
    monkeypatch.setattr(CheckpointWriter, "_run", lambda writing: go.wait(30) and run(writing))
    training = Training(tmp_path)
    training.step()
    expected = training.tensors()
    training.save()
    training.step()
    assert not any(map(torch.equal, training.tensors(), expected))
    go.set()
    training.load()
    assert all(map(torch.equal, training.tensors(), expected))


def test_the_host_waits_once_for_all_copies_from_a_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    events, to = [], torch.Tensor.to

    def copied(tensor: torch.Tensor, *where: object, **how: object) -> torch.Tensor:
        events.append("starts a copy" if how.get("non_blocking") else "copies")
        return to(tensor, *where, **how)

    stream = SimpleNamespace(synchronize=lambda: events.append("waits"))
    monkeypatch.setattr(torch.Tensor, "to", copied)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: stream)
    monkeypatch.setattr(torch.cuda, "get_rng_state", lambda device: torch.zeros(16, dtype=torch.uint8))
    monkeypatch.setattr(CheckpointWriter, "start", lambda writing, in_thread: events.append("writes"))
    training = Training(tmp_path)
    training.checkpoints.mesh = SimpleNamespace(**{**vars(MESH), "device": torch.device("cuda")})
    training.save()
    # Weight, moments, anchor, and the states of two generators.
    assert events == [*["starts a copy"] * 5, "waits", "writes"]


def test_a_checkpoint_that_is_begun_is_kept_when_the_run_ends_by_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    commit, wait, go = CheckpointWriter._commit, CheckpointWriter.wait, threading.Event()
    monkeypatch.setattr(CheckpointWriter, "_commit", lambda writer: go.wait(30) and commit(writer))
    training = Training(tmp_path)
    training.checkpoints.finish_writing()
    training.save()
    monkeypatch.setattr(CheckpointWriter, "wait", lambda writer, seconds: go.set() or wait(writer, seconds))
    training.checkpoints.finish_writing()
    assert (tmp_path / step_name(1) / STATE_FILE).is_file()


def test_a_checkpoint_that_can_not_be_completed_does_not_hide_the_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(writer: CheckpointWriter) -> None:
        raise OSError("a peer is gone")

    monkeypatch.setattr(CheckpointWriter, "_commit", fail)
    training = Training(tmp_path)
    training.save()
    training.checkpoints.finish_writing()
    assert not (tmp_path / step_name(1)).exists()


def test_a_checkpoint_that_is_being_deleted_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If the process is killed during the deletion, the next start deletes the rest, as it does with half-written
    checkpoints."""
    checkpoints = Training(tmp_path).checkpoints
    checkpoints.section = CheckpointSection(keep=1)
    for step in (1, 2):
        (tmp_path / step_name(step)).mkdir()
        (tmp_path / step_name(step) / STATE_FILE).write_text("{}")
    monkeypatch.setattr("llmtrain.train.checkpoint.shutil.rmtree", lambda path, ignore_errors: None)
    checkpoints._prune(2)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000001.tmp", step_name(2)]


def test_nothing_is_deleted_while_a_loss_can_not_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The checkpoint whose loss can't be read may be the best one."""
    checkpoints = Training(tmp_path).checkpoints
    checkpoints.section = CheckpointSection(keep=1)
    for step in (1, 2, 3):
        (tmp_path / step_name(step)).mkdir()
        evaluated = {"last_eval": {"loss": float(step), "tokens": 10}, "last_evaluated": step}
        (tmp_path / step_name(step) / STATE_FILE).write_text(json.dumps({"step": step, "ranks": [evaluated]}))
    with monkeypatch.context() as during:
        during.setattr(Path, "read_bytes", Mock(side_effect=OSError(errno.ESTALE, "Stale file handle")))
        with pytest.raises(OSError, match="Stale"):
            checkpoints._prune(3)
    checkpoints._prune(3)
    assert sorted(path.name for path in tmp_path.iterdir()) == [step_name(1), step_name(3)]


@pytest.mark.parametrize("background", [True, False])
def test_a_resumed_run_drops_what_the_undisturbed_one_drops(tmp_path: Path, background: bool) -> None:
    training = Training(tmp_path, background)
    torch.manual_seed(1)
    training.step()
    training.save()
    training.step()
    undisturbed = training.tensors()
    torch.manual_seed(2)  # another process
    training.load()
    training.step()
    assert all(map(torch.equal, training.tensors(), undisturbed))


def test_ranks_that_the_old_mesh_did_not_have_drop_by_their_positions_and_the_seed(tmp_path: Path) -> None:
    """A run of one rank continues on two replicas of two shards. Only the first rank continues the old random numbers."""
    training = Training(tmp_path)
    training.save()
    continued = torch.rand(4)
    training.checkpoints.wait()

    def drawn(replica: int, shard: int, seed: int = 0) -> torch.Tensor:
        axes = {"replica_comms": SimpleNamespace(rank=replica), "shard_comms": SimpleNamespace(rank=shard, size=2)}
        torch.manual_seed(3)  # another process
        Training(tmp_path, mesh=SimpleNamespace(**{**vars(MESH), "replicas": 2, **axes})).load(seed)
        return torch.rand(4)

    first, *others = (drawn(replica, shard) for replica in range(2) for shard in range(2))
    assert torch.equal(first, continued) and torch.equal(drawn(0, 0, seed=1), continued)
    assert torch.equal(drawn(1, 1), others[-1]), "the numbers are the same after another restart"
    seen = [continued, *others, drawn(1, 1, seed=1)]
    assert len({tuple(numbers.tolist()) for numbers in seen}) == 5


def test_a_checkpoint_of_another_version_is_one_line(tmp_path: Path) -> None:
    training = Training(tmp_path)
    training.checkpoints.recipe = load_recipe(ROOT / "recipes/edit_llama_stdlib.yaml")
    training.save()
    training.load()
    path = tmp_path / step_name(1)
    state = read_state(path)
    state["recipe"]["sync"]["penalty"] = {"kind": "edit"}
    (path / STATE_FILE).write_text(dump_state(state))
    with pytest.raises(
        RecipeError, match=rf"^the recipe in {path}: sync.penalty .*; another version wrote it"
    ) as refused:
        training.load()
    assert "\n" not in str(refused.value)
