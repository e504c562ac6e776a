"""Tests of training on two texts from the command line: two nodes that each have only their own text, and a mixture."""

from __future__ import annotations

import json
import sysconfig
from pathlib import Path

import pytest

from llmtrain.config import DataSection
from llmtrain.data.dataset import TOKENIZER
from llmtrain.data.prepare import prepare
from llmtrain.parallel.network import unused_port
from tests.end_to_end.runs import RECIPE, ROOT, RUN_SECONDS, SHORT, TINY, environment
from tests.mother import run_llmtrain, session

ENTRIES = "data.per_replica=[{source: a.txt}, {source: b.txt}]"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("two_texts")
    for site, modules in {"a": ("heapq", "textwrap", "bisect"), "b": ("queue", "shlex", "sched")}.items():
        (folder / site).mkdir()
        sources = [(Path(sysconfig.get_path("stdlib")) / f"{module}.py").read_text() for module in modules]
        (folder / site / f"{site}.txt").write_text("\n<|endoftext|>\n".join("".join(sources).split("\n\n")))
    trained = prepare(DataSection(source=f"{folder}/a/a.txt", tokenizer="train:400", cache_dir=f"{folder}/data"), 1, 1)
    trained.directory.joinpath(TOKENIZER).rename(folder / "tokenizer")
    return folder


def overrides(folder: Path, name: str, *more: str) -> list[str]:
    keys = [*TINY, *SHORT, f"run.name={name}", f"run.out_dir={folder}/runs", f"data.tokenizer={folder}/tokenizer"]
    return [
        str(ROOT / RECIPE),
        *keys,
        "data.cache_dir=tokens",
        "data.validation_fraction=0.2",
        "parallel.shards=1",
        *more,
    ]


def start(folder: Path, *command: str, **variables: str):
    return session().fork(run_llmtrain, *command, environment=environment() | variables, cwd=folder, capture=True)


def run(folder: Path, *command: str) -> tuple[int, str]:
    process = start(folder, *command)
    output, _ = process.communicate(timeout=RUN_SECONDS)
    return process.returncode, output


@pytest.mark.deep
def test_a_node_needs_the_text_of_its_own_site_alone(folder: Path) -> None:
    keys = overrides(folder, "sites", ENTRIES, "parallel.replicas=2", "train.steps=6", "train.global_batch=8")
    nodes = {"NNODES": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(unused_port()), "NPROC_PER_NODE": "1"}
    started = [start(folder / site, "launch", *keys, NODE_RANK=str(rank), **nodes) for rank, site in enumerate("ab")]
    outputs = [process.communicate(timeout=RUN_SECONDS)[0] for process in started]
    assert [process.returncode for process in started] == [0, 0], outputs
    assert "sites: a 50% (" in outputs[0] and "| b: validation loss" in outputs[0]
    assert "Read from a: 24 sequences" in outputs[0] and "the sites' losses differ by up to 0." in outputs[0]
    for site in "ab":
        (prepared,) = (folder / site / "tokens").glob("*/index.json")
        assert json.loads(prepared.read_text())["source"] == f"{site}.txt"
    summary = json.loads((folder / "runs/sites/summary.json").read_text())
    assert {name: text["sequences"] for name, text in summary["texts"].items()} == {"a": 24, "b": 24}
    losses = [text["eval_loss"] for text in summary["texts"].values()]
    assert summary["site_loss_spread"] == pytest.approx(abs(losses[0] - losses[1]))

    # Node b continues alone, with its own text first. The cursor of the other site stays in the checkpoint.
    other = ENTRIES.replace("a.txt", "c.txt").replace("b.txt", "a.txt").replace("c.txt", "b.txt")
    keys = overrides(folder, "sites", other, "parallel.replicas=1", "train.steps=8", "train.global_batch=8")
    code, output = run(folder / "b", "launch", *keys)
    assert code == 0, output
    assert "for 8 steps instead of 6, written by 2 replicas x 1 shard: 1 replica starts from their mean" in output
    assert "Read from a: 24 sequences · b: 40 sequences, " in output
    state = json.loads((folder / "runs/sites/checkpoints/step-00000008/state.json").read_text())
    (rank,) = state["ranks"]
    of_a = rank["loader"].pop("absent")["a"]
    assert len(rank["loader"].pop("sizes")) == len(of_a.pop("sizes")) == 1
    assert rank["loader"] == {"position": 40, "site": "b"} and of_a == {"position": 24}
    assert set(rank["texts"]) == {"a", "b"}
    code, output = run(folder, "export", str(folder / "runs/sites"))
    assert code == 0, output
    card = (folder / "runs/sites/export/step-00000008/README.md").read_text()
    assert "| data | `b.txt`, `a.txt`, tokenizer " in card

    # Node a comes back, but its text has changed.
    text = folder / "a" / "a.txt"
    before = text.read_text()
    text.write_text(f"new\n<|endoftext|>\n{before}")
    keys = overrides(folder, "sites", ENTRIES, "parallel.replicas=1", "train.steps=10", "train.global_batch=8")
    code, output = run(folder / "a", "launch", *keys)
    text.write_text(before)
    assert code and "the training text a is not the one with which the run's checkpoint was written" in output, output


@pytest.mark.deep
def test_a_mixture_shares_the_tokens_of_runs_on_its_texts_alone(folder: Path) -> None:
    entries = f"data.sources=[{{source: {folder}/a/a.txt, weight: 3}}, {{source: {folder}/b/b.txt}}]"
    keys = ["parallel.replicas=2", "train.steps=4", "sync.warmup_steps=1", "data.tokenizer=train:400"]
    code, output = run(folder, "prepare", *overrides(folder, "alone", f"data.source={folder}/a/a.txt", keys[-1]))
    assert code == 0, output
    before = sorted((folder / "tokens").glob("*/index.json"))
    code, output = run(folder, "recipe", "check", *overrides(folder, "mixture", entries, *keys))
    assert code == 0 and "data: not tokenized yet" in output, output
    code, output = run(folder, "launch", *overrides(folder, "mixture", entries, *keys))
    assert code == 0, output
    assert "mixture: a 75% (" in output and "validation loss" in output
    assert (
        len(before) == 1 and before[0] in (made := sorted((folder / "tokens").glob("*/index.json"))) and len(made) == 2
    )
    summary = json.loads((folder / "runs/mixture/summary.json").read_text())
    assert sum(text["sequences"] for text in summary["texts"].values()) == 64
    assert all(text["epochs"] > 0 and text["eval_loss"] > 0 for text in summary["texts"].values())
    code, output = run(folder, "recipe", "check", *overrides(folder, "mixture2", entries, *keys))
    assert code == 0 and "fine on this machine" in output and "not tokenized" not in output, output
