"""Output at the end of a run: summary.json, a plot of losses and costs, a last generated text, and a short report."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import suppress
from types import MappingProxyType
from typing import Any

from llmtrain.checkpoint_retention import best_step, read_losses
from llmtrain.errors import TrainingError, one_line
from llmtrain.files import read_lines
from llmtrain.parallel.comms import MESSAGE_LENGTH
from llmtrain.plan.model_size import size_of
from llmtrain.quantities import GIB, counted, format_elapsed, format_si, mesh_size
from llmtrain.run_plots import draw_run
from llmtrain.train.loggers import SampleLogger
from llmtrain.train.rank_errors import raise_on_all
from llmtrain.train.trainer import Trainer

MAX_WARNINGS = 20
"""Maximum number of warnings in summary.json, which has the newest ones."""


def summary_of(
    trainer: Trainer, stopped: str, mirrored: int | None, texts: Mapping[str, dict[str, Any]] = MappingProxyType({})
) -> dict[str, Any]:
    """Return the content of summary.json. Sums over ranks are those of the last log line. `stopped` is how the run ended:
    "done", "signal" or "error". `mirrored` is the step of the mirror's newest checkpoint. `texts` is the result of
    `RunTexts.summaries`."""
    metrics, stats = trainer.metrics, trainer.method.stats
    last, losses = metrics.last_line, read_losses(metrics.run_log.directory.checkpoints)
    best = best_step(losses)
    virtual = max(metrics.mesh.virtual_seconds, last.get("perf/virtual_seconds", 0.0))
    return {
        "method": trainer.recipe.sync.method,
        "replicas": metrics.mesh.replicas,
        "shards": metrics.mesh.shard_comms.size,
        "steps": trainer.state.global_step,
        "gradient_steps": last.get("train/gradient_steps"),
        "tokens": metrics.tokens,
        "train_seconds": round(metrics.train_seconds, 3),
        "tokens_per_second": round(metrics.tokens / metrics.train_seconds, 1) if metrics.train_seconds else None,
        "final_train_loss": last.get("train/loss"),
        "final_eval_loss": metrics.last_eval.loss if metrics.last_eval else None,
        "final_eval_step": trainer.state.last_evaluated if metrics.last_eval else None,
        "best_checkpoint_step": best,
        "best_checkpoint_loss": losses[best].loss if best is not None else None,
        "bytes_sent": round(last.get("comm/bytes_total", 0)),
        "other_bytes_sent": round(last.get("comm/other_bytes_total", 0)),
        **({"virtual_seconds": round(virtual, 3)} if virtual else {}),
        "sync_count": stats.count,
        "sync_seconds": round(stats.seconds, 3),
        "exposed_sync_seconds": round(metrics.exposed_seconds, 3),
        "peak_memory_bytes": round(last.get("perf/peak_memory_gib", 0) * GIB),
        "from_weights": trainer.checkpointer.from_weights,
        "stopped": stopped,
        "mirrored": mirrored,
        "warnings": metrics.run_log.warnings[-MAX_WARNINGS:],
        **({"texts": texts} if texts else {}),
        **({"site_loss_spread": loss_spread(texts)} if texts and trainer.recipe.data.per_replica else {}),
    }


def loss_spread(texts: Mapping[str, dict[str, Any]]) -> float | None:
    """Return the largest minus the smallest validation loss of the texts, or None without losses."""
    losses = [text["eval_loss"] for text in texts.values() if text["eval_loss"] is not None]
    return max(losses) - min(losses) if losses else None


def write_summary(trainer: Trainer, stopped: str, mirrored: int | None) -> None:
    """Write summary.json and the plot. All ranks wait until both exist. Raises TrainingError, on every rank, if
    writing fails."""
    recipe, mesh, directory = trainer.recipe, trainer.metrics.mesh, trainer.metrics.run_log.directory
    last = trainer.metrics.last_eval
    read = trainer.texts.summaries(trainer.loader.loader, trainer.loader.state_dict(), last.parts if last else {})

    def write() -> None:
        try:
            directory.write_summary(summary_of(trainer, stopped, mirrored, read))
            title = f"{recipe.run.name} · {recipe.sync.method} · {mesh_size(mesh.replicas, mesh.shard_comms.size)}"
            draw_run(read_lines(directory.metrics), directory.plot, title)
        except OSError as error:
            raise TrainingError(
                f"{directory.path} can't be written: {one_line(error)}; start the same command again when it can"
            ) from error

    raise_on_all(mesh, write if mesh.is_main else lambda: None)


def write_error_summary(trainer: Trainer, error: Exception, mirrored: int | None) -> None:
    """Write summary.json of a run that `error` has ended, if it can be written. Main rank only."""
    with suppress(OSError, RuntimeError):  # a full disk or a broken GPU may have ended the run
        summary = {**summary_of(trainer, "error", mirrored), "error": one_line(error, MESSAGE_LENGTH)}
        trainer.metrics.run_log.directory.write_summary(summary)


def print_report(trainer: Trainer) -> None:
    """Print a text sample, if `eval.sample_prompt` asks for one, and the report. A collective of all ranks."""
    metrics, sampler, step = trainer.metrics, trainer.validator.sampler, trainer.state.global_step
    mesh, directory, console = metrics.mesh, metrics.run_log.directory, metrics.run_log.console
    if sampler.is_wanted:
        sampled_at, text = metrics.run_log.last_sample or (None, None)  # the same on all ranks
        if sampled_at != step:  # the model is too large for samples during training, or the run was resumed at its end
            text = sampler.generate()
            if text is not None:
                with suppress(OSError):  # the text is printed anyway
                    SampleLogger(directory.samples, step - 1).log_sample(step, metrics.tokens, text)
        if text is not None:
            console.print(f"\nThe model writes ({directory.samples}):\n\n{text}\n")
    if mesh.is_main:
        parameters = size_of(trainer.recipe, sampler.prepared.vocab_size).parameters
        for line in final_report(trainer, directory.summary(), parameters):
            console.print(line)


def lines_about_texts(summary: Mapping[str, Any]) -> list[str]:
    """Return one line about what the run has read of each text of a mixture or of each site; none if the run had one text."""
    parts = []
    for name, text in summary.get("texts", {}).items():
        epochs = "" if text["epochs"] is None else f", {text['epochs']:.2f} epochs"
        loss = "" if text["eval_loss"] is None else f", validation loss {text['eval_loss']:.4f}"
        parts.append(f"{name}: {text['sequences']:,} sequences{epochs}{loss}")
    spread = summary.get("site_loss_spread")
    apart = "" if spread is None else f"; the sites' losses differ by up to {spread:.4f}"
    return [f"Read from {' · '.join(parts)}{apart}."] if parts else []


def every_step_bytes(lines: Iterable[Mapping[str, Any]], parameters: int) -> float:
    """Return the bytes that a run with these metrics lines would have sent if it had averaged gradients in every step.
    The number of replicas may change between lines."""
    total, before = 0.0, 0
    for line in lines:
        if "train/lr" in line:  # not a line of a validation
            total += (line["step"] - before) * 2 * (line["comm/replicas"] - 1) * 4 * parameters
            before = line["step"]
    return total


COMPARE_WITH = ("synchronous", "local_sgd")
"""Methods with which the report suggests a comparison: the baseline, or for a run of the baseline, the simplest other method.
Neither has an outer step, which would have to be tuned."""


def final_report(trainer: Trainer, summary: dict[str, Any], parameters: int) -> list[str]:
    """Return the lines of the report: the result, the traffic, the best checkpoint if it is not the last, and a suggestion for
    the next run."""
    recipe, metrics, run_log = trainer.recipe, trainer.metrics, trainer.metrics.run_log
    result = (
        f"Trained {counted(summary['steps'], 'step')}, {format_si(summary['tokens'])} tokens, in "
        f"{format_elapsed(summary['train_seconds'])} ({format_si(summary['tokens_per_second'])} tokens/s); validation loss "
        f"from {metrics.first_eval.loss:.2f} to {metrics.last_eval.loss:.2f} (perplexity {metrics.last_eval.perplexity:.4g})."
    )
    if run_log.warnings:
        count = len(run_log.warnings)
        result += f" {counted(count, 'warning')}, the last at {run_log.warnings[-1]}."
    if "virtual_seconds" in summary:
        result += f" By the virtual clock, this took {summary['virtual_seconds']:,.0f} s."
    every_step = every_step_bytes(read_lines(run_log.directory.metrics), parameters)
    count, comparison = summary["sync_count"], ""
    synchronizations = counted(count, "synchronization")
    if recipe.sync.period.averages_gradients:
        synchronizations = "gradients averaged in every step"
    elif summary["replicas"] > 1:
        comparison = f" (gradients averaged in every step: {format_si(every_step)}B)"
    sent = (
        f"{mesh_size(summary['replicas'], summary['shards'])} with {summary['method']}: {synchronizations}, "
        f"{format_si(summary['bytes_sent'])}B between replicas{comparison}."
    )
    other = next(method for method in COMPARE_WITH if method != recipe.sync.method)
    tensorboard = f" · tensorboard --logdir {recipe.run.out_dir}" if recipe.log.tensorboard else ""
    best, best_lines = summary["best_checkpoint_step"], []
    if best is not None and best < summary["steps"]:
        loss = summary["best_checkpoint_loss"]
        best_lines = [
            f"The best checkpoint is of step {best}, validation loss {loss:.4f} (--step best in export, generate, eval)"
        ]
    plot, run = run_log.directory.plot, run_log.directory.path
    return [
        result,
        *lines_about_texts(summary),
        sent,
        *best_lines,
        f"Look at {plot}{tensorboard} · llmtrain generate {run} · next: the same with sync.method={other} "
        f"run.name={recipe.run.name}_{other}",
    ]
