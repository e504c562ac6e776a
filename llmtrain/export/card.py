"""Model card (README.md) of an exported model: its training, its recipe and its evaluation results."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import transformers
from huggingface_hub import EvalResult, ModelCardData

import llmtrain
from llmtrain.config import DataSection
from llmtrain.config.data import HUB
from llmtrain.export.folder import Manifest
from llmtrain.export.request import WeightSource
from llmtrain.export.separators import describe_separators
from llmtrain.export.source import Source
from llmtrain.quantities import counted, format_si, mesh_size
from llmtrain.recipe_loader import resolved_yaml
from llmtrain.run_files import EVALUATIONS
from llmtrain.train.stored_weights import validates_anchor


def model_card(source: Source, manifest: Manifest) -> str:
    """Return the text of the model card, metadata header first.

    Evaluation results come from the run's `eval/`, for this checkpoint. They are of the weights that are exported by default, so
    the card of another export has none.
    """
    is_default = (manifest.weights, manifest.dtype) == ("mean", "fp32")
    scores = read_scores(source.run / EVALUATIONS, source.step, manifest.checkpoint) if is_default else []
    name, start = source.recipe.run.name, source.state.get("from_weights")
    how = "pretrained from scratch" if start is None else f"trained further from `{start['path']}`"
    parts = [
        f"---\n{_header(source, scores)}\n---",
        f"# {name}",
        f"A {source.recipe.model.type} language model of {format_si(manifest.parameters)} parameters, {how} with "
        f"llmtrain {llmtrain.__version__}.",
        _table(("", ""), _facts(source, manifest)),
        "## Use",
        _usage(source),
        "## Evaluation",
        _evaluation(scores),
        "## Recipe",
        f"<details><summary>recipe.yaml, resolved</summary>\n\n```yaml\n{resolved_yaml(source.recipe).rstrip()}\n```\n\n</details>",
    ]
    return "\n\n".join(parts) + "\n"


def _header(source: Source, scores: list[Score]) -> str:
    recipe = source.recipe
    hub = [text.source.removeprefix(HUB) for text in recipe.data.texts().values() if text.source.startswith(HUB)]
    results = [
        EvalResult(
            task_type="text-generation",
            dataset_type=score.task,
            dataset_name=score.task,
            metric_type=score.metric,
            metric_value=score.value,
        )
        for score in scores
        if not score.is_limited  # leaderboards show the value alone
    ]
    return ModelCardData(
        library_name="transformers",
        pipeline_tag="text-generation",
        tags=["llmtrain", recipe.sync.method, recipe.model.type],
        datasets=hub or None,
        model_name=recipe.run.name if results else None,
        eval_results=results or None,
    ).to_yaml()


def _facts(source: Source, manifest: Manifest) -> list[tuple[str, str]]:
    recipe, state = source.recipe, source.state
    replicas, shard = state["mesh"]
    progress = state["ranks"][0]
    engine = f"ZeRO-{recipe.parallel.zero_stage}" if recipe.parallel.engine == "zero" else "FSDP2"
    start, weights = state.get("from_weights"), WeightSource.parse(manifest.weights)
    of_anchor = validates_anchor(state)
    training, validation = progress["last_line"].get("train/loss"), progress["last_eval"]
    facts = [
        ("method", f"`{recipe.sync.method}`: {counted(progress['method']['report']['count'], 'synchronization')}"),
        ("started from", None if start is None else f"`{start['path']}`, digest `{start['digest']}`"),
        ("steps", f"{source.step:,} of {recipe.train.total_steps:,}"),
        ("tokens", f"{source.tokens:,}, sequences of {recipe.train.sequence_length:,}"),
        ("data", f"{_texts(recipe.data)}, tokenizer `{recipe.data.tokenizer}`"),
        ("mesh", f"{mesh_size(replicas, shard)} ({engine}), {recipe.parallel.precision}"),
        (
            "training loss",
            None
            if training is None
            else f"{training:.4f} nats per token, last logged interval, each replica with its own weights",
        ),
        (
            "validation loss",
            _loss(validation, progress["last_evaluated"], "the anchor" if of_anchor else "replicas' mean"),
        ),
        (
            "weights",
            f"{weights.describe(replicas, of_anchor)}, after step {source.step:,}, {manifest.dtype}",
        ),
        ("checked", manifest.parity.describe()),
        ("exported with", f"torch {torch.__version__}, transformers {transformers.__version__}"),
    ]
    return [(key, text) for key, text in facts if text is not None]


def _texts(data: DataSection) -> str:
    weights = {entry.name: f" (weight {entry.weight:g})" for entry in data.sources}
    return ", ".join(f"`{text.source}`{weights.get(name, '')}" for name, text in data.texts().items())


def _loss(validation: dict[str, Any], step: int, whose: str) -> str:
    loss = validation["loss"]
    perplexity = f"{math.exp(loss):.2f}" if loss < LARGEST_LOSS else "over e^100"
    return f"{loss:.4f} nats per token (perplexity {perplexity}), {whose} after step {step:,}"


def _usage(source: Source) -> str:
    separators = describe_separators(source.recipe.data, f"`{source.load_tokenizer().eos_token}`")
    return (
        "```python\nfrom transformers import AutoModelForCausalLM, AutoTokenizer\n\n"
        "model = AutoModelForCausalLM.from_pretrained(FOLDER)\n"
        "tokenizer = AutoTokenizer.from_pretrained(FOLDER)\n```\n\n"
        f"{separators} Encode with `add_special_tokens=False`. A special "
        "token that a text spells out is text like any other (`split_special_tokens`)."
    )


def _evaluation(scores: list[Score]) -> str:
    if not scores:
        return "Not evaluated on benchmarks yet."
    rows = [
        (score.suite, score.task, score.metric, "–" if score.n is None else f"{score.n:,.0f}", str(score))
        for score in scores
    ]
    return _table(("suite", "task", "metric", "documents", "value"), rows)


def _table(head: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    cells = [head, ("---",) * len(head), *((cell.replace("|", "\\|") for cell in row) for row in rows)]
    return "\n".join(f"| {' | '.join(row)} |" for row in cells)


LARGEST_LOSS = 100.0
"""Loss from which on the perplexity is not written out, because that of a diverged run has too many digits for a card."""
COUNTS = ("n", "tokens", "bytes")
"""Keys of results that are counts, not scores."""


@dataclass(frozen=True)
class Score:
    """One metric of one task."""

    suite: str
    task: str
    metric: str
    value: float
    stderr: float | None
    n: float | None
    """Number of documents; None if unknown."""
    is_limited: bool = False
    """True if the evaluation was told to use fewer documents than the suite has (`--limit`)."""

    def __str__(self) -> str:
        return f"{self.value:.4f}" + ("" if self.stderr is None else f" ± {self.stderr:.4f}")


def read_scores(folder: Path, step: int, digest: str) -> list[Score]:
    """Return the scores of the checkpoint after `step` from the JSON files in `folder`, ordered by file name. Of several scores of
    one metric, the newest on all documents is returned or, without one on all documents, the newest. Files that name another
    `digest` are skipped: they are of weights from an earlier training of this step.

    Files and values of any other form are skipped, because a model card does not need results.
    """
    found: dict[tuple[str, str, str], list[tuple[tuple[bool, str], Score]]] = {}
    for file in sorted(folder.glob("*.json")):
        try:
            content = json.loads(file.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            continue
        if not isinstance(content, dict) or content.get("digest") not in (None, digest):
            continue
        if content.get("checkpoint_step") == step:
            suite, is_limited = str(content.get("suite", file.stem)), content.get("limit") is not None
            rank = (not is_limited, str(content.get("date", "")))
            for key, score in _scores_of(suite, content.get("results")):
                found.setdefault((suite, score.task, key), []).append((rank, replace(score, is_limited=is_limited)))
    return [max(reversed(scores), key=lambda ranked: ranked[0])[1] for scores in found.values()]


def _scores_of(suite: str, results: Any) -> Iterator[tuple[str, Score]]:
    """Yield the key of each score in a file's results, and the score."""
    if not isinstance(results, dict):
        return
    for task, metrics in results.items():
        if not isinstance(metrics, dict):
            continue
        numbers = {
            key: float(value)
            for key, value in metrics.items()
            if isinstance(value, int | float) and not isinstance(value, bool)
        }
        for key, value in numbers.items():
            metric, comma, variant = key.partition(",")  # lm-eval's "acc,none"
            if not (metric.endswith("_stderr") or key.endswith("_stderr") or key in COUNTS):
                errors = (f"{key}_stderr", f"{metric}_stderr{comma}{variant}", f"{metric}_stderr")
                stderr = next((numbers[name] for name in errors if name in numbers), None)
                name = metric if variant in ("", "none") else key
                yield key, Score(suite, task, name, value, stderr, numbers.get("n"))
