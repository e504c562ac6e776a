"""Streaming and tokenizing of a long text while a run trains, with connections that break and processes that are killed.

    python benchmarks/stream.py                              # 2 GB of text, 20 interruptions; about an hour on two cores
    python benchmarks/stream.py --megabytes 40 --interruptions 3

The text is the Python files of the standard library and of all installed packages, repeated with a salt. It is a data set of jsonl
files on a stand-in for the hub (`local_hub`), and is tokenized twice. *Undisturbed*: by `llmtrain prepare`, which also trains the
tokenizer, over connections that hold. *Disturbed*: by runs of a small model that begin with the first block, while the hub breaks off
one of five answers at random. In turn and at random moments, the runs are interrupted (Ctrl-C), killed (SIGKILL of all processes), or
lose their tokenizing process to SIGKILL. After the last interruption, `prepare` continues to the end of the text. The table says how
long after the command the first new step was logged, and whether all tokens are equal. After a SIGKILL of the run, the steps since its
last checkpoint are repeated before a new one; their time is included, and these starts have a row of their own.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import random
import signal
import site
import statistics
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import psutil
from local_hub import LocalHub
from loops import MODEL, RECIPE, end_with_children
from table import RESULTS, ROOT, Row, markdown, parser, show, write_page

from llmtrain.errors import STOPPED_EARLY

FILE_BYTES = 50_000_000
DROP = 0.2
KILLED = "SIGKILL of the run"
KINDS = ("Ctrl-C", KILLED, "SIGKILL of the tokenizer")
FIRST_STEP_SECONDS, END_SECONDS = 300.0, 120.0
COLUMNS = ("what", "value")
KEYS = [
    *(f"model.config.{key}={value}" for key, value in {**MODEL, "hidden_size": 64, "intermediate_size": 128}.items()),
    "train.sequence_length=128",
    "train.global_batch=8",
    "train.micro_batch=4",
    "train.steps=null",
    "parallel.replicas=2",
    "parallel.shards=1",
    "checkpoint.every=20",
    "log.every=1",
    "log.tensorboard=false",
    "eval.every=null",
    "eval.tokens=1000",
    "eval.sample_prompt=null",
    "run.restarts=0",
]


def documents() -> Iterator[str]:
    """Yield the standard library's and the packages' Python files, again and again, each time with another salt."""
    roots = [Path(sysconfig.get_path("stdlib")), *map(Path, site.getsitepackages())]
    files = sorted({path for root in roots for path in root.rglob("*.py")})
    for salt in range(10**6):
        for path in files:
            with contextlib.suppress(OSError, UnicodeDecodeError):
                yield f"# {salt}\n{path.read_text(encoding='utf-8')}"


def write_files(folder: Path, size: int) -> dict[str, Path]:
    """Write `size` bytes of documents to jsonl files, and return them by their names in the data set."""
    texts, files, written = documents(), {}, 0
    while written < size:
        path = folder / f"train-{len(files):05d}.jsonl"
        with path.open("w") as file:
            while file.tell() < min(FILE_BYTES, size / 4) and written + file.tell() < size:
                file.write(json.dumps({"text": next(texts)}) + "\n")
            written += file.tell()
        files[f"data/{path.name}"] = path
    return files


class Command:
    """`llmtrain` commands on the streamed text."""

    def __init__(self, folder: Path, hub: LocalHub, tokens: int) -> None:
        self.folder = folder
        self._keys = [*KEYS, "data.source=hf:o/d", f"train.tokens={tokens}"]
        self._environment = {**os.environ, **hub.environment(folder / "home"), "PYTHONPATH": str(ROOT)}

    def start(self, command: str, cache: str, *more: str) -> subprocess.Popen:
        keys = [*self._keys, f"data.cache_dir={self.folder / cache}", f"run.out_dir={self.folder / 'runs'}", *more]
        return subprocess.Popen(
            [sys.executable, "-m", "llmtrain", command, RECIPE, "run.name=stream", *keys],
            cwd=ROOT,
            env=self._environment,
            start_new_session=True,
        )

    def prepare(self, cache: str, tokenizer: str) -> Path:
        """Prepare all tokens, and return their folder. The command is started again each time it fails, up to 100 times."""
        for _ in range(100):
            if self.start("prepare", cache, f"data.tokenizer={tokenizer}").wait() == 0:
                [index] = (self.folder / cache).glob("*/index.json")
                return index.parent
        raise SystemExit("prepare did not end in 100 attempts")


def steps(folder: Path) -> int:
    """Return the number of steps that the run has logged."""
    lines = folder / "runs" / "stream" / "metrics.jsonl"
    return lines.read_text().count('"train/loss"') if lines.exists() else 0


def tokenizers_below(process: subprocess.Popen) -> list[psutil.Process]:
    """Return the tokenizing processes among a run's descendants."""
    found = []
    for child in psutil.Process(process.pid).children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            if "llmtrain.data.background" in child.cmdline():
                found.append(child)
    return found


def disturb(
    command: Command, tokenizer: str, interruptions: int, drawn: random.Random
) -> tuple[list[float], list[str]]:
    """Train, and interrupt the run again and again. Return each start's seconds to the first new step, and the interruptions."""
    seconds, done = [], []
    while len(done) < interruptions:
        before, began = steps(command.folder), time.monotonic()
        process = command.start("launch", "disturbed", f"data.tokenizer={tokenizer}")
        try:
            while steps(command.folder) <= before:
                if process.poll() is not None or time.monotonic() - began > FIRST_STEP_SECONDS:
                    raise SystemExit(f"no first step; exit code {process.poll()}")
                time.sleep(0.1)
            seconds.append(time.monotonic() - began)
            time.sleep(drawn.uniform(0, 10))
            kind = KINDS[len(done) % len(KINDS)]
            victims = tokenizers_below(process) if kind == "SIGKILL of the tokenizer" else []
            if kind == "SIGKILL of the tokenizer" and not victims:
                kind = "Ctrl-C, when all text was tokenized"
            if victims:
                for one in victims:
                    one.kill()
                time.sleep(drawn.uniform(5, 15))  # the run starts it again
                assert process.poll() is None, "the run has ended with its tokenizer"
            if kind != KILLED:
                process.send_signal(signal.SIGINT)
                if (code := process.wait(END_SECONDS)) != STOPPED_EARLY:
                    raise SystemExit(f"the interrupted run ended with exit code {code}")
            done.append(kind)
        finally:
            end_with_children(process)
    return seconds, done


def first_steps(seconds: Sequence[float], done: Sequence[str]) -> list[Row]:
    """Return the table's rows about the seconds to the first new step, given these seconds and the interruption of each start.
    Starts after a SIGKILL of the run, which repeat steps, have a row of their own."""
    found: dict[str, list[float]] = {"first step after": []}
    for taken, before in zip(seconds, ("", *done[:-1]), strict=True):
        name = f"first new step after a {KILLED}, repeated ones included" if before == KILLED else "first step after"
        found.setdefault(name, []).append(taken)
    return [
        (name, f"{statistics.median(series):.1f} s (median), {max(series):.1f} s (longest) of {len(series)} starts")
        for name, series in found.items()
    ]


def digest(folder: Path) -> str:
    """Return the number of tokens of both splits, and a digest of all of them."""
    index, found = json.loads((folder / "index.json").read_text()), hashlib.sha256()
    counts = []
    for split in ("train", "validation"):
        for shard in index["splits"][split]["shards"]:
            found.update(np.load(folder / shard["name"], mmap_mode="r"))
        counts.append(f"{index['splits'][split]['tokens']:,}")
    return f"{' + '.join(counts)} tokens, {found.hexdigest()[:16]}"


def main() -> None:
    """Make the text, tokenize it twice, compare the tokens, print the table, and write the page if `--write` is given."""
    arguments = parser(__doc__)
    arguments.add_argument("--megabytes", type=int, default=2000, help="size of the text")
    arguments.add_argument("--interruptions", type=int, default=20)
    arguments.add_argument("--tokenizer", default="train:4096", help="data.tokenizer")
    arguments.add_argument("--folder", type=Path, help="for all files, about twice the size of the text; temporary")
    options = arguments.parse_args()
    with tempfile.TemporaryDirectory(dir=options.folder) as name:
        folder = Path(name)
        (folder / "files").mkdir()
        size = options.megabytes * 1_000_000
        files = write_files(folder / "files", size)
        # As a number of tokens, `size` is more than the text has, so that it is read to its end.
        with LocalHub(files) as hub:
            began = time.monotonic()
            undisturbed = Command(folder, hub, size).prepare("undisturbed", options.tokenizer)
            undisturbed_seconds = time.monotonic() - began
        with LocalHub(files, drop=DROP, seed=1) as hub:
            command = Command(folder, hub, size)
            tokenizer = str(undisturbed / "tokenizer")  # which is not trained again
            seconds, done = disturb(command, tokenizer, options.interruptions, random.Random(0))
            disturbed = command.prepare("disturbed", tokenizer)
            broken = hub.dropped
        one, other = digest(undisturbed), digest(disturbed)
        rows = [
            ("text", f"{size / 1e9:.2f} GB in {len(files)} files"),
            ("undisturbed", f"{one} in {undisturbed_seconds:.0f} s"),
            ("disturbed", other),
            ("equal", "yes" if one == other else "NO"),
            ("interruptions", ", ".join(f"{done.count(kind)} x {kind}" for kind in dict.fromkeys(done))),
            ("connections broken off", str(broken)),
            *first_steps(seconds, done),
            ("steps in the run's log", f"{steps(folder):,}"),
        ]
    show("A stream that breaks", COLUMNS, rows)
    if options.write:
        write_page(
            RESULTS / "stream", "Training beside tokenizing", [markdown(COLUMNS, rows), __doc__.split("\n\n")[2]]
        )
    if one != other:
        sys.exit("the tokens differ")


if __name__ == "__main__":
    main()
