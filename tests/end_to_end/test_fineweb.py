"""Test of the FineWeb recipe, which prepares and trains on a real sample where there is one."""

from __future__ import annotations

import math
import sys
from pathlib import Path

import pytest

from llmtrain.data.dataset import open_dataset
from tests.end_to_end.runs import TINY, Runs


@pytest.fixture
def sample(shared_data: Path) -> Path:
    """Return the folder of the FineWeb sample. Skip the test if there is none."""
    folder = shared_data / "fineweb"
    if not folder.is_dir():
        pytest.skip(f"no sample of FineWeb in {folder}; set LLMTRAIN_DATA to a folder that has fineweb/")
    return folder


@pytest.mark.deep
def test_the_recipe_prepares_and_trains_on_fineweb(
    sample: Path, shared_data: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    runs = Runs(tmp_path_factory.mktemp("fineweb"))
    keys = {
        "run.out_dir": runs.folder / "runs",
        "data.cache_dir": runs.folder / "tokens",
        "data.source": sample / "fineweb_sample_train.parquet",
        "data.validation": sample / "fineweb_sample_valid.parquet",
        "data.tokenizer": shared_data / "tokenizers/gpt2",
        "data.max_tokens": 20_000,
        "eval.sets.stories": shared_data / "tinystories/valid.txt",
    }
    given = [*TINY, *(f"{key}={value}" for key, value in keys.items())]
    few = [
        "train.steps=6",
        "optim.lr=2e-2",
        "train.global_batch=4",
        "eval.every=null",
        "eval.tokens=400",
        "eval.sample_prompt=null",
    ]
    alone = ["parallel.replicas=1", "parallel.shards=1", "checkpoint.every=null", "log.tensorboard=false"]
    recipe = "recipes/edit_llama_fineweb.yaml"
    code, output = runs.end(runs.start([sys.executable, "-m", "llmtrain", "train", recipe, *given, *few, *alone]))
    assert code == 0, output

    validated = [line for line in runs.lines("edit_llama_fineweb") if "eval/loss" in line]
    assert validated[-1]["eval/loss"] < validated[0]["eval/loss"] < math.log(50_257) * 1.05
    assert validated[-1]["eval/stories/loss"] < validated[0]["eval/stories/loss"]
    (folder,) = (path for path in (runs.folder / "tokens").glob("fineweb_sample_train-*") if path.is_dir())
    prepared = open_dataset(folder, {"train": 20_000, "validation": 401})
    counts = prepared.index.splits["train"]
    assert 3.5 < counts.text_bytes / counts.tokens < 5.5, "GPT-2's tokens of English web text have four to five bytes"
