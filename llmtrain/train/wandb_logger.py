"""Weights & Biases as a destination of log lines."""

from __future__ import annotations

import html
import threading
import uuid
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from queue import SimpleQueue

import psutil

from llmtrain.config import Recipe
from llmtrain.errors import RecipeError, TrainingError, one_line
from llmtrain.files import atomic_write
from llmtrain.train.loggers import Logger
from llmtrain.train.run_dir import RunDirectory
from llmtrain.waiting import announced

WANDB_SECONDS, WANDB_SECONDS_FAILED = 60.0, 2.0
"""Maximum seconds for which the end of a run waits for Weights & Biases, normally and after a failure. After a failure, the
launcher kills ranks that take longer than its PATIENCE_SECONDS, and the error is printed only after the wait."""


class WandbLogger(Logger):
    """Logger to Weights & Biases, or with `mode: offline` to a folder for `wandb sync`. A resumed run keeps its id,
    unless its folder was copied or renamed.

    A thread makes all calls, because they may hang. The first error ends the thread, because wandb's own process may
    have been killed, and metrics.jsonl also has the lines.
    """

    def __init__(self, recipe: Recipe, directory: RunDirectory, resumed_step: int, note: Callable[[str], None]):
        """Open the run. `note` receives a line if later calls fail."""
        import wandb

        section = recipe.log.wandb
        run_id = _id_of(directory.path / "wandb_id.txt", recipe.run.name, is_new=not resumed_step)
        try:
            self._run = wandb.init(
                project=section.project,
                entity=section.entity,
                mode=section.mode,
                name=recipe.run.name,
                id=run_id,
                resume="allow",
                dir=directory.path,
                config=recipe.model_dump(mode="json"),
                settings=wandb.Settings(console="off", silent=True),
            )
        except wandb.Error as error:
            # A server that cannot be reached now may answer the next time.
            kind = TrainingError if type(error) is wandb.errors.CommError else RecipeError
            raise kind(f"log.wandb: {one_line(error)}; `wandb login`, or log.wandb.mode=offline") from error
        self._run.define_metric("tokens")
        for group in ("train/*", "eval/*"):  # drawn over tokens by default; the user can choose steps for any chart
            self._run.define_metric(group, step_metric="tokens")
        self._note, self._directory, self._seconds = note, directory, WANDB_SECONDS
        self._calls: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        # A daemon, because the thread must not keep the process alive after `wait` has given up on it.
        self._thread = threading.Thread(target=self._make_calls, name="Weights & Biases", daemon=True)
        self._thread.start()

    def log(self, step: int, tokens: int, seconds: float, tags: dict[str, float]) -> None:
        line = {"tokens": tokens, "seconds": seconds, **tags}
        self._queue(lambda: self._run.log(line, step=step))

    def log_sample(self, step: int, tokens: int, text: str) -> None:
        import wandb

        page = f"<pre>{html.escape(text)}</pre>"
        self._queue(lambda: self._run.log({"tokens": tokens, "sample": wandb.Html(page)}, step=step))

    def close(self, failed: bool = False) -> None:
        """Finish the run in the background."""
        self._seconds = WANDB_SECONDS_FAILED if failed else WANDB_SECONDS
        self._queue(lambda: self._run.finish(exit_code=int(failed)))
        self._queue(None)

    def wait(self) -> None:
        with announced("Weights & Biases", self._seconds):
            self._thread.join(self._seconds)
        if not self._thread.is_alive():
            return
        rest = f"`wandb sync {self._directory.path}/wandb/latest-run` sends the rest"
        self._warn(f"not everything was sent within {self._seconds:g} s; {rest}")
        with suppress(psutil.Error):  # otherwise wandb would wait for its process when this one exits
            for child in psutil.Process().children():
                if child.name().startswith("wandb"):
                    child.kill()

    def _queue(self, call: Callable[[], None] | None) -> None:
        if self._thread.is_alive():
            self._calls.put(call)

    def _make_calls(self) -> None:
        try:
            for call in iter(self._calls.get, None):
                call()
        except BaseException as error:  # of many kinds; none may end the run
            self._warn(
                f"{one_line(error)}; nothing more is sent, but lines are still written to {self._directory.metrics}"
            )
        with suppress(BaseException):  # wandb exits with the code of its process
            import wandb

            wandb.teardown()  # waits for wandb's own process, which may still write the file when finish() returns

    def _warn(self, text: str) -> None:
        """Print a line, once."""
        note, self._note = self._note, lambda text: None
        note(f"warning: log.wandb: {text}")


def _id_of(file: Path, name: str, is_new: bool) -> str:
    """Return the id that `file` stores for the run `name`, or a new one. In a copy of a run's folder under another
    name, the file has the original's id and name; the same id would mix the lines of both runs. Earlier versions stored
    no name."""
    run_id, _, owner = ("" if is_new or not file.exists() else file.read_text(encoding="utf-8").strip()).partition(" ")
    if not run_id or owner not in ("", name):
        run_id = uuid.uuid4().hex[:8]
    atomic_write(file, f"{run_id} {name}\n")
    return run_id
