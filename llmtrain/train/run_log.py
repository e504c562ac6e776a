"""Output of a run while it trains: lines, samples and warnings, on the console and to the loggers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial

from llmtrain.config import Recipe
from llmtrain.train.loggers import Console, Logger, open_loggers
from llmtrain.train.rank_errors import IoErrors
from llmtrain.train.run_dir import RunDirectory
from llmtrain.train.state import TrainState


class RunLog:
    """Console and loggers of one rank. Every rank calls the same methods, but only the main rank prints and logs. Write
    errors are recorded in `io_errors` until all ranks can raise them together."""

    def __init__(self, recipe: Recipe, directory: RunDirectory, console: Console, io_errors: IoErrors, is_main: bool):
        self.recipe, self.directory, self.console = recipe, directory, console
        self.io_errors, self.is_main = io_errors, is_main
        self.warnings: list[str] = []
        """Warnings since this start, each with its step."""
        self.last_sample: tuple[int, str] | None = None
        """Step and text of the last sample since this start."""
        self._loggers: Sequence[Logger] = ()

    @contextmanager
    def open(self, state: TrainState, tokens: int, rounds: int | None) -> Iterator[None]:
        """Open the loggers and the progress bar for the enclosed training. Training continues from `state`, after `tokens`
        training tokens of all replicas. `rounds` is as in `Console.start`. A collective of all ranks.

        Raises TrainingError, on every rank, if metrics cannot be written, and RecipeError if a
        logger can't be used.
        """
        opened = (self.recipe, self.directory, state.global_step, tokens, self.console.print)
        if self.is_main:
            self._loggers = self.io_errors.write(self.directory.metrics, lambda: open_loggers(*opened)) or ()
        try:
            self.io_errors.check()
            self.console.start(state.global_step, state.total_steps, rounds)
            yield
        except BaseException:
            for logger in self._loggers:
                with suppress(Exception):  # the disk may have ended the run, because it is full
                    logger.close(failed=True)
            raise
        else:
            self._to_loggers(lambda logger: logger.close())
            self.io_errors.check()
        finally:
            self.console.stop()

    def wait(self) -> None:
        """Wait for the loggers' work in the background. Called when no other rank waits for this one any more."""
        for logger in self._loggers:
            logger.wait()

    def log_step(self, step: int, tokens: int, seconds: float, tags: dict[str, float]) -> None:
        """Log and print a line of metrics."""
        self._to_loggers(lambda logger: logger.log(step, tokens, seconds, tags))
        self.console.log_step(step, tags)

    def log_validation(
        self, step: int, tokens: int, seconds: float, tags_by_text: Mapping[str, dict[str, float]]
    ) -> None:
        """Log a validation of one or several texts in one line, and print a line for each."""
        for name, tags in tags_by_text.items():
            self.console.log_validation(step, name, tags)
        all_tags = {tag: value for tags in tags_by_text.values() for tag, value in tags.items()}
        self._to_loggers(lambda logger: logger.log(step, tokens, seconds, all_tags))

    def log_sample(self, state: TrainState, tokens: int, text: str) -> None:
        """Log a text that the model has generated, and print its beginning. The text of the last step is printed with the report
        instead."""
        self.last_sample = (state.global_step, text)
        self._to_loggers(lambda logger: logger.log_sample(state.global_step, tokens, text))
        if not state.is_done:
            self.console.log_sample(state.global_step, text)

    def warn(self, step: int, text: str) -> None:
        """Print a warning that concerns the steps up to `step`, and keep it for the summary."""
        self.warnings.append(f"step {step}: {text}")
        self.console.warn(step, text)

    def _to_loggers(self, call: Callable[[Logger], None]) -> None:
        for logger in self._loggers:
            self.io_errors.write(self.directory.metrics, partial(call, logger))
