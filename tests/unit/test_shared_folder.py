"""Tests of hosts that do not share the run directory, or see with a delay what another host has written there."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from llmtrain.errors import RecipeError, TrainingError, UserError
from llmtrain.parallel.in_process import InProcess
from llmtrain.parallel.mesh import Mesh
from llmtrain.parallel.world import World
from llmtrain.train import shared_folder
from llmtrain.train.checkpoint_files import digests, find_corruption_on_any_rank
from llmtrain.train.shared_folder import check_is_shared

HERE = socket.gethostname()


def outcomes(hosts: int, work: Callable[[Mesh], object]) -> list[object]:
    """Call `work` on one rank for each of `hosts` hosts, and return what it returned or raised on each rank."""
    ranks, errors = InProcess(hosts, 30.0), {}

    def call(world: World) -> None:
        with ranks.open_mesh(world) as mesh:
            try:
                errors[world.rank] = work(replace(mesh, world=World(world.rank, hosts, 0, 1)))
            except (UserError, TrainingError) as error:
                errors[world.rank] = error

    ranks.run(call)
    return [errors[rank] for rank in range(hosts)]


@pytest.fixture
def folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """Provide the run directory as each of three hosts sees it. The first two hosts share one. No host waits for a file."""
    monkeypatch.setattr(shared_folder, "PATIENCE_SECONDS", 0.0)
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
    return [tmp_path / "a", tmp_path / "a", tmp_path / "b"]


def test_a_run_directory_that_a_host_does_not_share_ends_all_ranks(folders: list[Path]) -> None:
    def check(mesh: Mesh) -> None:
        check_is_shared(folders[mesh.world.rank], mesh, 60.0)

    assert outcomes(2, check) == [None, None]
    for kind in (RecipeError, TrainingError):
        errors = outcomes(3, check)
        assert [type(error) for error in errors] == [kind] * 3 and all(error.is_shared for error in errors)
        [line] = set(map(str, errors))
        assert line.startswith(
            f"run.out_dir is not shared: {HERE} can't see in {folders[2]} what rank 0 on {HERE} writes to {folders[0]}; mount"
        )
        assert not list(folders[0].iterdir())
        (folders[2] / "recipe.yaml").touch()  # the run has begun, so a host may lack the file system only for now


def test_what_a_network_file_system_does_not_know_yet_is_asked_for_again(
    folders: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """NFS remembers for up to a minute that a folder did not exist, unless somebody opens the folder above it."""
    opened, stat, open_file = set(), os.stat, os.open

    def late(path: str | Path, *given: object, **options: object) -> os.stat_result:
        if folders[0] in Path(path).parents and folders[0].parent not in opened:
            raise FileNotFoundError(path)
        return stat(path, *given, **options)

    monkeypatch.setattr(os, "open", lambda path, *rest: opened.add(Path(path)) or open_file(path, *rest))
    monkeypatch.setattr(os, "stat", late)
    monkeypatch.setattr(shared_folder, "PATIENCE_SECONDS", 2.0)
    assert outcomes(2, lambda mesh: check_is_shared(folders[0], mesh, 60.0)) == [None, None]


def test_a_host_that_does_not_see_a_checkpoint_does_not_make_it_damaged(folders: list[Path]) -> None:
    files = {}
    for name in ("__0_0.distcp", "__1_0.distcp", "__2_0.distcp"):
        (folders[0] / name).write_text(name)
        files |= digests(folders[0], [name])

    def check(mesh: Mesh) -> object:
        return find_corruption_on_any_rank(folders[mesh.world.rank], files, mesh)

    (folders[0] / "__1_0.distcp").unlink()
    assert outcomes(2, check) == [f"__1_0.distcp is gone on {HERE}"] * 2
    folders[2].rmdir()
    errors = outcomes(3, check)
    assert [type(error) for error in errors] == [TrainingError] * 3
    assert {str(error).partition(", which rank 0 does; mount")[0] for error in errors} == {
        f"{HERE} does not see {folders[2]}"
    }
