"""Documents of a task from a local file, for lm-evaluation-harness's `custom_dataset`."""

from __future__ import annotations

import gzip
import json
import zlib
from pathlib import Path
from typing import Any

from datasets import Dataset


def load(*, data_dir: str | None = None, file: str, **_: Any) -> dict[str, Dataset]:
    """Return the rows of `data_dir`/`file` (JSON lines, possibly gzipped) as the split `test`.

    `data_dir` comes from the metadata: `llmtrain eval --data-dir DIR`, or `lm_eval --metadata '{"data_dir": "DIR"}'`. Raises
    ValueError for a damaged file, or one without rows.
    """
    if data_dir is None:
        raise ValueError(f'{file}: data_dir is not given; with lm_eval say --metadata \'{{"data_dir": "DIR"}}\'')
    path = Path(data_dir) / file
    try:
        with gzip.open(path, "rt", encoding="utf-8") if path.suffix == ".gz" else path.open(encoding="utf-8") as lines:
            rows = [json.loads(line) for line in lines if line.strip()]
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise ValueError(f"{path} is a damaged gzip file: {error}") from None
    if not rows:
        raise ValueError(f"{path} has no rows")
    return {"test": Dataset.from_list(rows)}
