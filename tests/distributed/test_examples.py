"""Tests of the examples of docs/library.md: replicas end with equal and finite parameters."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from examples import fsdp2_loop, plain_loop, transformers_trainer
from llmtrain.sync.sync_stats import SyncStats
from tests.distributed.pool import RankPool

ROOT = Path(__file__).parents[2]


def parameters_of(model: nn.Module) -> list[torch.Tensor]:
    local = (p.to_local() if isinstance(p, DTensor) else p for p in model.state_dict().values())
    return [parameter.clone() for parameter in local]


def run_plain(folder: str) -> list[torch.Tensor]:
    """Run a loop that ends while ranks rename their checkpoints, and continue it from the last step of which both have one."""
    plain_loop.main(steps=8, folder=Path(folder), save_every=2)
    if dist.get_rank() == 1:
        plain_loop.checkpoint(Path(folder), 8).unlink()
    resumed = parameters_of(plain_loop.main(steps=12, folder=Path(folder), save_every=4))
    assert plain_loop.steps_in(Path(folder)) == [8, 12], "the last two, of which the first was written again"
    assert all(map(torch.equal, resumed, parameters_of(plain_loop.main(steps=12))))
    return resumed


def run_fsdp2() -> list[torch.Tensor]:
    return parameters_of(fsdp2_loop.main(steps=8))


def run_trainer(folder: str) -> list[torch.Tensor]:
    return parameters_of(transformers_trainer.main(folder, steps=18))


def assert_equal_replicas(of_ranks: list[list[torch.Tensor]], shards: int = 1) -> None:
    for one, other in zip(of_ranks[:shards], of_ranks[shards:], strict=True):
        assert all(map(torch.equal, one, other)) and all(bool(tensor.isfinite().all()) for tensor in one)


def test_the_example_of_a_plain_loop(ranks: RankPool, tmp_path: Path) -> None:
    """A loop that continues gives the same bits as one that was never ended."""
    assert_equal_replicas(ranks.run(run_plain, str(tmp_path), world_size=2))


def resume_with_more_processes(folder: str) -> list[int]:
    """Return the steps of this rank's checkpoints after a start with two processes, of which only the first has any."""
    for step in (2, 4) if dist.get_rank() == 0 else ():
        plain_loop.checkpoint(Path(folder), step).touch()
    with pytest.raises(SystemExit, match="no step of which all ranks have a checkpoint"):
        plain_loop.main(steps=8, folder=Path(folder))
    return plain_loop.steps_in(Path(folder))


def test_the_example_of_a_plain_loop_deletes_no_checkpoints_of_fewer_processes(ranks: RankPool, tmp_path: Path) -> None:
    assert ranks.run(resume_with_more_processes, str(tmp_path), world_size=2) == [[2, 4], []]


def test_the_example_of_sharded_replicas(ranks: RankPool) -> None:
    assert_equal_replicas(ranks.run(run_fsdp2, world_size=4), shards=2)


def test_the_example_of_transformers_trainer(ranks: RankPool, tmp_path: Path) -> None:
    assert_equal_replicas(ranks.run(run_trainer, str(tmp_path), world_size=2))


def test_a_trainer_that_would_use_several_gpus_is_refused() -> None:
    callback = transformers_trainer.LocalUpdatesCallback(method="diloco")
    arguments = SimpleNamespace(load_best_model_at_end=False, n_gpu=8)
    with pytest.raises(
        ValueError, match=r"^this process sees 8 GPUs, expected one; start torchrun with --virtual-local"
    ):
        callback.on_train_begin(arguments, None, None)


def test_the_page_shows_the_examples() -> None:
    page = (ROOT / "docs/library.md").read_text()
    for name in ("plain_loop", "fsdp2_loop", "transformers_trainer"):
        assert f"../examples/{name}.py" in page


def test_the_page_describes_every_counter() -> None:
    page = (ROOT / "docs/library.md").read_text()
    named = [*(field.name for field in fields(SyncStats)), "exposed_seconds", "wait_seconds"]
    assert [name for name in named if f"`{name}`" not in page] == []
