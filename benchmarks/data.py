"""Speed of tokenizing text compared with the tokenizers library alone, and time for which a step waits for its batch.

    python benchmarks/data.py                                     # the standard library's source; two minutes
    python benchmarks/data.py --source train.txt --tokenizer FOLDER

First, `prepare` and the bare library take turns on the same text, in one process that uses all cores. Then the loader reads
batches of the prepared tokens, alone and inside steps of a small Llama. With `--write`, the tables go to
benchmarks/results/data/.
"""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from loops import ENDLESS, MODEL, NEVER, RECIPE, ask, build, is_asked, opened, quartiles, take_turns
from table import RESULTS, ROOT, Row, markdown, parser, show, write_page

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from llmtrain.config import DataSection

BATCH_CHARACTERS = 1_000_000
"""Characters per batch for the tokenizers library, as many as `prepare` gives it."""
FAST, PLAIN, PREPARE = "library, without offsets", "library", "prepare"
READ = "reading the text"
COLUMNS = ("what", "seconds", "quartiles", "MB/s", "M tokens/s", "of the library", "processor s", "one thread, s")
LOADER_COLUMNS = (
    "text",
    "micro-batch x length",
    "µs a batch",
    "quartiles",
    "M tokens/s",
    "step, ms",
    "share of the step",
)
PACKED, MIXTURE, DOCUMENTS = "packed", "mixture of two, packed", "documents, not packed"
SHAPES = (
    *((PACKED, shape) for shape in ((8, 128), (8, 1024), (1, 4096))),
    *((kind, shape) for kind in (MIXTURE, DOCUMENTS) for shape in ((8, 128), (8, 1024))),
)
"""(Kind of text, (micro-batch, sequence length)) of each measurement of the loader."""
NOTES = """\
Medians over the turns, of the same text. *library*: `encode_batch` of the tokenizers library on text that is in memory,
1 M characters at a time, and nothing done with what it returns; *without offsets*: its `encode_batch_fast`. *prepare*:
everything, from files to token shards flushed to the disk, both splits, with a tokenizer that is there. *Reading the text* is
a part of it: it is read once, for both splits. *Processor s*: of all
threads; *one thread*: of the calling one, in which nothing runs side by side. However many processors a machine has, it takes
no less time than that."""
LOADER_NOTES = """\
The loader's batches, from shards that are in the system's file cache. The mixture is three parts of the text and one part of
`stories`, or of `stdlib` if the text is `stories`. Batches of documents are padded to their longest, and padding counts here
as tokens
do. *Step*: of a Llama of 4.2 M parameters on this machine, with that batch; the share is what the trainer logs
(`perf/data_seconds` over `perf/step_seconds`). A faster machine or a larger model changes the step; the batch costs what it
costs: at N tokens a second and rank, its share is N / (tokens/s of the loader)."""


def library(tokenizer: PreTrainedTokenizerBase, batches: Sequence[Sequence[str]], fast: bool) -> int:
    """Tokenize all texts with the library alone, `fast` without offsets, and return the number of tokens."""
    backend = tokenizer.backend_tokenizer
    encode = backend.encode_batch_fast if fast else backend.encode_batch
    return sum(len(one) for batch in batches for one in encode(batch, add_special_tokens=False))


def prepared_tokens(data: DataSection) -> int:
    """Prepare both splits in an empty folder, and return their number of tokens, without eos."""
    from llmtrain.data.prepare import prepare

    with tempfile.TemporaryDirectory() as folder:
        prepared = prepare(data.model_copy(update={"cache_dir": folder}), 1, 10**12)
        return sum(split.tokens - split.documents for split in prepared.index.splits.values())


def batched(texts: Sequence[str]) -> list[list[str]]:
    """Return the texts in batches of at least BATCH_CHARACTERS, the last one excepted."""
    batches: list[list[str]] = [[]]
    for text in texts:
        if sum(map(len, batches[-1])) >= BATCH_CHARACTERS:
            batches.append([])
        batches[-1].append(text)
    return batches


def clocked(work: Callable[[], int]) -> dict[str, float]:
    """Call `work`, and return its number of tokens, its seconds, and the CPU seconds of the process and of the calling thread."""
    clocks = {"seconds": time.perf_counter, "cpu": time.process_time, "thread": time.thread_time}
    began = {name: clock() for name, clock in clocks.items()}
    tokens = work()
    return {"tokens": tokens, **{name: clock() - began[name] for name, clock in clocks.items()}}


def tokenize(task: dict[str, Any]) -> dict[str, Any]:
    """Tokenize the text in each way by turns, and return the figures for the first table."""
    from llmtrain.config import DataSection
    from llmtrain.data.prepare import cache_path, prepare
    from llmtrain.data.sources import SPLITS, documents

    os.environ["TOKENIZERS_PARALLELISM"] = "true"
    asked = DataSection(source=task["source"], tokenizer=task["tokenizer"], cache_dir=str(ROOT / "data"))
    kept = prepare(asked, 1, 1)  # trains the tokenizer once, if the task names one to train
    data = asked.model_copy(update={"tokenizer": str(cache_path(asked) / "tokenizer")})
    tokenizer = kept.load_tokenizer()

    def read() -> int:
        for split in SPLITS:
            for _ in documents(data, split):
                pass
        return 0

    texts = [text for split in SPLITS for text in documents(data, split)]
    batches = batched(texts)
    found = take_turns(
        {
            FAST: lambda: clocked(lambda: library(tokenizer, batches, fast=True)),
            PLAIN: lambda: clocked(lambda: library(tokenizer, batches, fast=False)),
            PREPARE: lambda: clocked(lambda: prepared_tokens(data)),
            READ: lambda: clocked(read),
        },
        task["turns"],
    )
    return {"bytes": sum(len(text.encode()) for text in texts), "documents": len(texts), "found": found}


def load(task: dict[str, Any]) -> dict[str, Any]:
    """Return the figures for a row of the second table: seconds and tokens of batches alone, and (seconds, data seconds) of steps."""
    from llmtrain.recipe_loader import load_recipe

    micro_batch, length = task["shape"]
    recipe = load_recipe(
        ROOT / RECIPE,
        [
            *(f"model.config.{key}={value}" for key, value in MODEL.items()),
            f"model.config.max_position_embeddings={length}",
            *("parallel.replicas=1", "parallel.shards=1", "sync.method=local_sgd", NEVER, *ENDLESS),
            *(f"train.global_batch={micro_batch}", f"train.micro_batch={micro_batch}"),
            f"train.sequence_length={length}",
            *text_keys(task["kind"], task["source"]),
            f"data.tokenizer={task['tokenizer']}",
        ],
    )
    with opened(recipe, 1, 1) as (mesh, prepared, scratch):
        trainer = build(recipe, mesh, prepared, scratch)
        trainer.train_step()  # warms up
        interval, steps = trainer.metrics.interval, []
        for _ in range(task["turns"]):
            before = interval.step_seconds, interval.data_seconds
            trainer.train_step()
            steps.append((interval.step_seconds - before[0], interval.data_seconds - before[1]))
        batches = [clocked(partial(_batch, trainer.loader)) for _ in range(task["batches"])]
    return {
        "batches": [one["seconds"] for one in batches],
        "tokens": [one["tokens"] for one in batches],
        "steps": steps,
    }


def text_keys(kind: str, source: str) -> list[str]:
    """Return the recipe's overrides for a kind of text: PACKED, MIXTURE or DOCUMENTS."""
    if kind == MIXTURE:
        other = "stdlib" if source == "stories" else "stories"
        return [f"data.sources=[{{source: {source}, weight: 3}}, {{source: {other}, weight: 1}}]"]
    return [f"data.source={source}", *(["data.packing=none"] if kind == DOCUMENTS else [])]


def _batch(loader: Any) -> int:
    return sum(batch.shape[0] * (batch.shape[1] - 1) for batch in loader.next())


def measure(task: dict[str, Any]) -> dict[str, Any]:
    """Return the figures for the table that the task names."""
    return load(task) if "shape" in task else tokenize(task)


def rows_of(found: Mapping[str, Sequence[Mapping[str, float]]], text_bytes: int) -> list[Row]:
    """Return the rows of the first table."""
    library_seconds = statistics.median(turn["seconds"] for turn in found[PLAIN])
    rows = []
    for name, turns in found.items():
        low, seconds, high = quartiles([turn["seconds"] for turn in turns])
        cpu, thread = (statistics.median(turn[key] for turn in turns) for key in ("cpu", "thread"))
        tokens = turns[0]["tokens"]
        rows.append(
            (
                name,
                f"{seconds:.2f}",
                f"{low:.2f} to {high:.2f}",
                f"{text_bytes / seconds / 1e6:.1f}",
                f"{tokens / seconds / 1e6:.2f}" if tokens else "",
                f"{library_seconds / seconds:.2f}" if tokens else "",
                f"{cpu:.2f}",
                f"{thread:.2f}",
            )
        )
    return rows


def loader_row(kind: str, shape: tuple[int, int], found: Mapping[str, Any]) -> Row:
    """Return a row of the second table."""
    low, middle, high = quartiles(found["batches"])
    step = statistics.median(seconds for seconds, _ in found["steps"])
    share = statistics.median(data / seconds for seconds, data in found["steps"])
    return (
        kind,
        f"{shape[0]} x {shape[1]}",
        f"{1e6 * middle:.0f}",
        f"{1e6 * low:.0f} to {1e6 * high:.0f}",
        f"{statistics.mean(found['tokens']) / middle / 1e6:.1f}",
        f"{1000 * step:.0f}",
        f"{100 * share:.3f} %",
    )


def main() -> None:
    """Measure, print both tables, and write the page if `--write` is given."""
    arguments = parser(__doc__)
    arguments.add_argument("--source", default="stdlib", help="data.source: a file or folder of text")
    arguments.add_argument("--tokenizer", default="train:4096", help="data.tokenizer")
    arguments.add_argument("--turns", type=int, default=5)
    arguments.add_argument("--batches", type=int, default=500, help="for the loader alone")
    options = arguments.parse_args()
    source = str(Path(options.source).resolve()) if Path(options.source).exists() else options.source
    tokenizer = str(Path(options.tokenizer).resolve()) if Path(options.tokenizer).exists() else options.tokenizer
    task = {"source": source, "tokenizer": tokenizer, "turns": options.turns, "batches": options.batches}
    answer = ask(__file__, 1, task)
    rows = rows_of(answer["found"], answer["bytes"])
    title = f"{answer['bytes'] / 1e6:.1f} MB of text in {answer['documents']:,} documents, {os.cpu_count()} processors"
    show(title, COLUMNS, rows)
    loader_rows = [
        loader_row(kind, shape, ask(__file__, 1, {"kind": kind, "shape": shape, **task})) for kind, shape in SHAPES
    ]
    show("The loader", LOADER_COLUMNS, loader_rows)
    if options.write:
        tables = [markdown(COLUMNS, rows), NOTES, markdown(LOADER_COLUMNS, loader_rows), LOADER_NOTES]
        write_page(RESULTS / "data", "Text to tokens to batches", [f"{title}.", *tables])


if __name__ == "__main__" and not is_asked(measure):
    main()
