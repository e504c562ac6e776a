"""Destinations of log lines: always the console and metrics.jsonl; TensorBoard and Weights & Biases if the recipe
enables them. A new destination subclasses `Logger`."""

from __future__ import annotations

import json
import math
import re
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console as RichConsole

from llmtrain.config import Recipe
from llmtrain.files import atomic_write, read_lines
from llmtrain.quantities import counted, format_elapsed, format_si, mesh_size
from llmtrain.recipe_loader import resolved_yaml
from llmtrain.startup import seconds_since_command
from llmtrain.train.progress import DelayedProgress
from llmtrain.train.run_dir import RunDirectory


class Logger:
    """Destination of log lines and samples on the main rank. By default, its methods do nothing. Methods raise OSError
    if writing fails."""

    def log(self, step: int, tokens: int, seconds: float, tags: dict[str, float]) -> None:
        """Record one line: the global step, training tokens of all replicas, training seconds and values by tag."""

    def log_sample(self, step: int, tokens: int, text: str) -> None:
        """Record a text that the model has generated after `step`."""

    def close(self, failed: bool = False) -> None:
        """Flush and close. `failed` says that training has ended with an error."""

    def wait(self) -> None:
        """Wait, for a limited time, until everything is closed. Raises nothing."""


class JsonlLogger(Logger):
    """Logger to metrics.jsonl, one JSON object per line. Values that are not finite are written as null."""

    def __init__(self, path: Path, resumed_step: int):
        """Open the file and drop the lines after `resumed_step`, which will be logged again."""
        # A run without a checkpoint starts again, including the validation before the first step, so no line is kept.
        kept = [line for line in read_lines(path) if line["step"] <= resumed_step] if resumed_step else []
        self.last_step = max((line["step"] for line in kept), default=0)
        """Step of the last line kept; 0 if no line was kept."""
        atomic_write(path, "".join(json.dumps(line) + "\n" for line in kept))
        self._file = path.open("a", encoding="utf-8", buffering=1)

    def log(self, step: int, tokens: int, seconds: float, tags: dict[str, float]) -> None:
        values = {tag: value if math.isfinite(value) else None for tag, value in tags.items()}
        self._file.write(json.dumps({"step": step, "tokens": tokens, "seconds": round(seconds, 3), **values}) + "\n")

    def close(self, failed: bool = False) -> None:
        self._file.close()


SAMPLE = "==== step {step} ===="
"""Line above each sample in samples.txt."""
SAMPLE_STEP = re.compile(SAMPLE.format(step=r"(\d+)"))


class SampleLogger(Logger):
    """Logger of samples to samples.txt, each below a line with its step."""

    def __init__(self, path: Path, resumed_step: int):
        """Open the file and drop the samples after `resumed_step`, which will be generated again."""
        self.path = path
        if not path.exists():
            return
        kept = []
        is_kept = resumed_step > 0
        for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
            if (found := SAMPLE_STEP.fullmatch(line)) is not None:
                is_kept = 0 < int(found[1]) <= resumed_step
            if is_kept:
                kept.append(line + "\n")
        atomic_write(path, "".join(kept))

    def log_sample(self, step: int, tokens: int, text: str) -> None:
        with self.path.open("a", encoding="utf-8") as file:
            file.write(f"{SAMPLE.format(step=step)}\n{text}\n\n")


class TensorBoardLogger(Logger):
    """Logger to TensorBoard event files: all tags by step, losses also by tokens, the recipe and samples as text."""

    BY_TOKENS = ("train/loss", "eval/loss")

    def __init__(self, recipe: Recipe, folder: Path, resumed_step: int, resumed_tokens: int):
        from torch.utils.tensorboard import SummaryWriter

        self._by_step = SummaryWriter(str(folder), purge_step=resumed_step + 1 if resumed_step else 0)
        # TensorBoard's x axis is always the step, so this writer passes tokens as steps. It has its own folder, because
        # a purge drops all entries of a folder from some step on.
        purge = resumed_tokens + 1 if resumed_step else 0
        self._by_tokens = SummaryWriter(str(folder / "over_tokens"), purge_step=purge)
        self._by_step.add_text("recipe", _as_markdown(resolved_yaml(recipe)), resumed_step)

    def log(self, step: int, tokens: int, seconds: float, tags: dict[str, float]) -> None:
        for tag, value in tags.items():
            self._by_step.add_scalar(tag, value, step)
        for tag in self.BY_TOKENS:
            if tag in tags:
                self._by_tokens.add_scalar(f"loss_over_tokens/{tag.partition('/')[0]}", tags[tag], tokens)

    def log_sample(self, step: int, tokens: int, text: str) -> None:
        self._by_step.add_text("sample", _as_markdown(text), step)

    def close(self, failed: bool = False) -> None:
        self._by_step.close()
        self._by_tokens.close()


def _as_markdown(text: str) -> str:
    """Return Markdown that shows any text verbatim."""
    return "\n".join(f"    {line}" for line in text.splitlines())


def open_loggers(
    recipe: Recipe,
    directory: RunDirectory,
    resumed_step: int,
    resumed_tokens: int,
    note: Callable[[str], None],
) -> Sequence[Logger]:
    """Open the loggers of a run that continues after `resumed_step` (0 for a new run), with `resumed_tokens`. `note`
    receives a line if metrics.jsonl has lost the line of the checkpoint, or if exports or evaluations of later steps
    exist, which are set aside. Raises OSError if a file can't be written. Raises RecipeError or TrainingError if
    Weights & Biases can't be used."""
    jsonl = JsonlLogger(directory.metrics, resumed_step)
    if jsonl.last_step < resumed_step:
        lost = f"steps {jsonl.last_step + 1} to {resumed_step}"
        note(f"warning: {directory.metrics} has no lines of {lost}, which precede the checkpoint; these lines are lost")
    if moved := directory.set_aside_after(resumed_step):
        names = ", ".join(str(path.relative_to(directory.path)) for path in moved)
        note(
            f"steps after {resumed_step} are trained again, so their earlier exports and evaluation results were renamed: {names}"
        )
    loggers: list[Logger] = [jsonl, SampleLogger(directory.samples, resumed_step)]
    if recipe.log.tensorboard:
        loggers.append(TensorBoardLogger(recipe, directory.tensorboard, resumed_step, resumed_tokens))
    if recipe.log.wandb is not None:
        from llmtrain.train.wandb_logger import WandbLogger  # here, because it imports this module

        loggers.append(WandbLogger(recipe, directory, resumed_step, note))
    return loggers


LOCAL_LINE_SECONDS = 15.0
"""Seconds without output after which, in timed rounds, the first replica reports its own step."""


SAMPLE_CHARACTERS = 100
"""Characters of a sample that its console line shows."""


class Console:
    """Console output of one run: a progress bar on a terminal, plain lines elsewhere. Silent if not `enabled`, as on every
    rank except the main rank."""

    def __init__(self, enabled: bool):
        self.out = RichConsole(file=sys.stdout, quiet=not enabled, highlight=False, soft_wrap=True)
        self._bars: DelayedProgress | None = None
        self._has_begun = False
        self._shown_count, self._shown_memory = 0.0, 0.0
        self._printed_at = time.monotonic()

    def start(self, step: int, total: int, rounds: int | None) -> None:
        """Start the display of a run that starts or continues after `step`. `rounds` is the number of rounds of the run,
        0 if all steps are synchronous, and None if it is not known in advance."""
        self._total, self._rounds, self._first, self._started = total, rounds, step, time.monotonic()
        if self._is_shown_live:
            self._bars = DelayedProgress(self.out)
            self._task = self._bars.add_task("training", total=total, completed=step)
            self._bars.start()

    @property
    def _is_shown_live(self) -> bool:
        return self.out.is_terminal and not self.out.quiet

    @contextmanager
    def progress(self, label: str, total: int | None = None) -> Iterator[Callable[[], None]]:
        """Show a bar for the enclosed code if the output is a terminal and the code takes long. Yields a function that
        advances the bar by one of `total`."""
        if not self._is_shown_live:
            yield lambda: None
        elif self._bars is not None:
            with self._bars.delayed(label, total) as advance:
                yield advance
        else:
            with DelayedProgress(self.out) as bars, bars.delayed(label, total) as advance:
                yield advance

    def advance(self, step: int, is_alone: bool = False) -> None:
        """Move the progress bar to `step`. The first call prints the seconds since the command was started. `is_alone`
        says that other replicas may be at other steps, as within a timed round. Without a bar, a line then reports
        this replica's step from time to time."""
        if not self._has_begun:
            self._has_begun = True
            self._first, self._started = step, time.monotonic()  # the time up to the first step is not typical
            self.print(f"first step {seconds_since_command():.1f} s after the command was started")
        if self._bars is not None:
            self._bars.update(self._task, completed=step)
        elif is_alone and time.monotonic() - self._printed_at > LOCAL_LINE_SECONDS:
            self.print(
                f"step {step}/{self._total} on the first replica; the next loss is printed when replicas exchange step counts"
            )

    def log_step(self, step: int, tags: dict[str, float]) -> None:
        """Print a line of metrics. It includes the replicas' divergence only after a round that measured it, and the
        memory only if it has grown by 1 % since it was last printed."""
        parts = [
            f"step {step}/{self._total}",
            f"loss {tags['train/loss']:.3f}",
            f"lr {tags['train/lr']:.1e}",
            f"gn {tags['train/grad_norm']:.2f}",
            f"{format_si(tags['perf/tokens_per_second'])} tok/s",
        ]
        if "perf/mfu" in tags:
            parts.append(f"mfu {100 * tags['perf/mfu']:.0f}%")
        parts.append(self._phase(int(tags["sync/round"])))
        if sent := tags["comm/bytes_total"]:
            measured = tags["sync/divergence"] if tags["sync/count"] > self._shown_count else 0.0
            parts.append(f"{format_si(sent)}B between replicas" + (f", divergence {measured:.2g}" if measured else ""))
        if tags["perf/peak_memory_gib"] > 1.01 * self._shown_memory:
            self._shown_memory = tags["perf/peak_memory_gib"]
            parts.append(f"memory {self._shown_memory:.2f} GiB")
        if self._bars is None and step > self._first:
            parts.append(f"eta {self._time_left(step)}")
        self._shown_count = tags["sync/count"]
        self.print(" | ".join(parts))

    def _phase(self, number: int) -> str:
        if number == 0:
            return "synchronous" if self._rounds == 0 else "synchronous warm-up"
        return f"round {number}" if self._rounds is None else f"round {number}/{self._rounds}"

    def log_validation(self, step: int, name: str, tags: dict[str, float]) -> None:
        """Print a validation result: the three `tags` of `ValidationSet.tags`. `name` is empty for the run's own text."""
        loss, perplexity, bits_per_byte = tags.values()
        ppl = f"{perplexity:.2f}" if perplexity < 1e6 else f"{perplexity:.1e}"
        text = f"validation loss {loss:.4f} | ppl {ppl} | {bits_per_byte:.3f} bits per byte"
        self.print(f"step {step}/{self._total} | {name + ': ' if name else ''}{text}")

    def log_sample(self, step: int, text: str) -> None:
        """Print the beginning of a text that the model has generated."""
        line = " ".join(text.split())
        line = line if len(line) <= SAMPLE_CHARACTERS else f"{line[: SAMPLE_CHARACTERS - 1]}…"
        self.print(f"step {step}/{self._total} | writes: {line}")

    def warn(self, step: int, text: str) -> None:
        """Print a warning that concerns the steps up to `step`."""
        self.print(f"step {step}/{self._total} | warning: {text}")

    def print(self, text: str) -> None:
        """Print a line verbatim, without interpreting markup."""
        self.out.print(text, markup=False)
        self._printed_at = time.monotonic()

    def stop(self) -> None:
        """Stop the progress bar."""
        if self._bars is not None:
            self._bars.stop()
            self._bars = None

    def _time_left(self, step: int) -> str:
        left = max(0, self._total - step)
        return format_elapsed((time.monotonic() - self._started) / max(1, step - self._first) * left)


def mesh_line(replicas: int, shards: int, device_type: str, reason: str, connections: int = 1) -> str:
    """Return the console's line about the mesh. `reason` is `plan_mesh`'s reason for the mesh's shape. `connections` is
    the number of connections from a rank to each peer in another replica."""
    several = f" · {connections} connections to each replica" if connections > 1 else ""
    return f"mesh: {mesh_size(replicas, shards)} on {device_type} ({reason}){several}"


def model_line(recipe: Recipe, parameters: int, blocks: int, sequences: int | None) -> str:
    """Return the console's line about the model, the run's length and the data. `sequences` is None if the data are not
    tokenized yet."""
    total, train = recipe.train.total_steps, recipe.train
    data = "not tokenized yet"
    if sequences is not None:
        what = "documents" if recipe.data.packing == "none" else "sequences"
        data = f"{format_si(sequences)} {what}, {total * train.global_batch / sequences:.2f} epochs"
    return (
        f"model: {format_si(parameters)} parameters in {counted(blocks, 'block')} · {counted(total, 'step')} of {recipe.data.at_most}"
        f"{format_si(train.tokens_per_step)} tokens, {format_si(total * train.tokens_per_step)} in all · data: {data}"
    )
