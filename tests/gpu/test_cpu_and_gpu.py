"""Tests that a run on a GPU, or on both devices in turn, has the losses of a run on a CPU, as closely as fp32 allows."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from llmtrain.config import CheckpointSection
from llmtrain.reshard import first
from llmtrain.run_files import step_name
from llmtrain.train.checkpoint import Checkpointer
from tests.distributed.fake_engine import edit
from tests.distributed.pool import RankPool
from tests.distributed.real_engine import GPT_NEO, LLAMA, SEED, Case, Run, mesh_of
from tests.gpu.on_gpu import PENALTY, case_of

STEPS, CLOSE = 20, 1e-5


def case_on(device: str, model: object = LLAMA) -> Case:
    sync = edit(every=4, warmup_steps=2, penalty=PENALTY, offload=True)
    return replace(case_of(sync, model=model, steps=STEPS, optim={"lr": 1e-3}), device=device)


def losses_with_changes(case: Case, devices: list[str], folder: Path) -> list[float]:
    """Return the losses of a run in equal parts, one per device. Each part continues from the last part's checkpoint."""
    run = Run(replace(case, device=devices[0]), mesh_of(1, 1, devices[0]))
    for number, device in enumerate(devices[1:], start=1):
        step = number * STEPS // len(devices)
        run.train(step)
        written = _checkpoints(run, folder)
        sums = run.sums
        written.save(step, lambda sums=sums: {"sums": sums})
        written.wait()
        run.method.close()
        run = Run(replace(case, device=device), mesh_of(1, 1, device), step)
        _checkpoints(run, folder).load(folder / step_name(step), {"sums": first}, SEED)
        run.sums = sums
    run.train(STEPS)
    return run.finish().losses


def _checkpoints(run: Run, folder: Path) -> Checkpointer:
    return Checkpointer(folder, run.mesh, run.engine, run.method, CheckpointSection(), 60.0)


@pytest.mark.parametrize("model", [LLAMA, GPT_NEO], ids=["llama", "gpt_neo"])
@pytest.mark.parametrize("devices", [["cuda"], ["cuda", "cpu"], ["cpu", "cuda"]], ids=" then ".join)
def test_losses_are_those_of_a_cpu(ranks: RankPool, tmp_path: Path, model: object, devices: list[str]) -> None:
    runs = ((devices, tmp_path / "changing"), (["cpu"], tmp_path / "cpu"))
    [found], [expected] = (
        ranks.run(losses_with_changes, case_on("cpu", model), on, folder, world_size=1) for on, folder in runs
    )
    assert found == pytest.approx(expected, rel=CLOSE)
    assert found[-1] < found[0]
