"""Test of a hub whose connections break at random. The tokens are the same as those of an undisturbed process."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.local_hub import LocalHub
from llmtrain.config import DataSection
from llmtrain.data.dataset import open_dataset
from llmtrain.data.prepare import prepare
from tests.unit.test_data_damage import all_tokens

TEXTS = [f"Document {i} says {i * i}. " * 20 for i in range(400)]
FILES = 4
READ = """
import sys
import datasets
from llmtrain.config import DataSection
from llmtrain.data import extend
from llmtrain.data.prepare import prepare
from llmtrain.errors import DataError
# else the library tries again itself, every 5 s
datasets.config.STREAMING_READ_MAX_RETRIES, datasets.config.STREAMING_READ_RETRY_INTERVAL = 1, 0
extend.BATCH_CHARACTERS = 10_000
for attempt in range(200):
    try:
        prepare(DataSection.model_validate_json(sys.argv[1]), 10**9, 10**9)
        break
    except DataError as error:
        assert "start the same command again" in str(error) or "needs the Hugging Face hub" in str(error), error
"""


@pytest.mark.deep
def test_connections_that_break_lose_and_repeat_nothing(tmp_path: Path) -> None:
    lines = [json.dumps({"text": text}) + "\n" for text in TEXTS]
    names = [f"data/train-{number}.jsonl" for number in range(FILES)]
    files = {name: "".join(lines[number::FILES]).encode() for number, name in enumerate(names)}
    for name, content in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(content)
    local = DataSection(source=str(tmp_path / "data"), tokenizer="train:320", validation_fraction=0.2)
    expected = prepare(local.model_copy(update={"cache_dir": str(tmp_path / "undisturbed")}), 10**9, 10**9)
    tokenizer = str(expected.directory / "tokenizer")
    hub_data = local.model_copy(
        update={"source": "hf:o/d", "tokenizer": tokenizer, "cache_dir": str(tmp_path / "disturbed")}
    )
    with LocalHub(files, drop=0.6, seed=1) as hub:
        done = subprocess.run(
            [sys.executable, "-c", READ, hub_data.model_dump_json()],
            env={**os.environ, **hub.environment(tmp_path / "home")},
            capture_output=True,
            text=True,
            timeout=100,
        )
    assert done.returncode == 0, done.stderr
    assert hub.dropped > 3, "too few connections were dropped"
    [index] = (tmp_path / "disturbed").glob("*/index.json")
    for split in ("train", "validation"):
        assert all_tokens(open_dataset(index.parent), split) == all_tokens(expected, split)
