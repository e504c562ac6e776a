"""Output of a finished run: a plot of the losses, a text sample from the model, and a three-line report."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import torch

from llmtrain.config import Recipe
from llmtrain.data.index import TokenDataset
from llmtrain.parallel.engine import Engine
from llmtrain.parallel.mesh import Mesh
from llmtrain.seeding import derive_seed
from llmtrain.train.console import format_si
from llmtrain.train.run_dir import RunDirectory


def draw_losses(metrics: Path, target: Path, title: str) -> None:
    """Plot training and validation loss over tokens, from metrics.jsonl to a PNG."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import EngFormatter

    lines = [json.loads(text) for text in metrics.read_text().splitlines()]
    figure = Figure(figsize=(7, 4.2), layout="constrained")
    axes = figure.add_subplot()
    for tag, label, style in (("train/loss", "training", "-"), ("eval/loss", "validation (mean of replicas)", "o--")):
        points = [(line["tokens"], line[tag]) for line in lines if line.get(tag) is not None]
        if points:
            axes.plot(*zip(*points, strict=True), style, label=label, markersize=4)
    axes.set(xlabel="tokens of all replicas", ylabel="loss (nats per token)", title=title)
    axes.xaxis.set_major_formatter(EngFormatter(sep=""))
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(target, dpi=130)


def write_sample(recipe: Recipe, engine: Engine, mesh: Mesh, model_config: Any, prepared: TokenDataset) -> str | None:
    """Generate a continuation of `eval.sample_prompt`. Returns the text on the main rank, None elsewhere. A
    collective of each shard group."""
    from transformers import AutoModelForCausalLM

    weights = engine.full_weights()
    if not mesh.is_main:
        return None
    model = AutoModelForCausalLM.from_config(model_config, dtype=torch.float32).eval()
    model.load_state_dict(weights, strict=False)
    tokenizer = prepared.load_tokenizer()
    prompt = tokenizer(recipe.eval.sample_prompt or "", add_special_tokens=False)["input_ids"]
    inputs = torch.tensor([[prepared.eos_id, *prompt]])
    torch.manual_seed(derive_seed(recipe.run.seed, "sample"))
    room = recipe.train.sequence_length - inputs.shape[1]
    written = model.generate(
        inputs,
        attention_mask=torch.ones_like(inputs),
        max_new_tokens=max(1, min(recipe.eval.sample_tokens, room)),
        do_sample=True,
        temperature=0.7,
        top_k=40,
        eos_token_id=prepared.eos_id,
        pad_token_id=prepared.eos_id,
    )
    return tokenizer.decode(written[0, 1:], skip_special_tokens=True)


COMPARE_WITH = ("diloco", "edit")
"""Methods that a finished run suggests next. Their rounds are counted in steps, so they fit a run of any length."""


def final_report(
    recipe: Recipe, summary: dict[str, Any], first_eval_loss: float | None, parameters: int, directory: RunDirectory
) -> list[str]:
    """Return three lines: the result, the traffic, and a suggestion for the next run."""
    minutes, seconds = divmod(round(summary["train_seconds"]), 60)
    fell = f" from {first_eval_loss:.2f}" if first_eval_loss is not None else ""
    happened = (
        f"Trained {summary['steps']} steps, {format_si(summary['tokens'])} tokens, in {minutes} min {seconds} s "
        f"({format_si(summary['tokens_per_second'])} tokens/s); validation loss{fell} to {summary['final_eval_loss']:.2f} "
        f"(perplexity {math.exp(summary['final_eval_loss']):.1f})."
    )
    every_step = summary["steps"] * 2 * (summary["replicas"] - 1) * 4 * parameters
    sent = (
        f"{summary['replicas']} replicas x {summary['shards']} shards with {summary['method']}: {summary['sync_count']} "
        f"synchronizations, {format_si(summary['bytes_sent'])}B between replicas"
        + (f" (gradients averaged in every step: {format_si(every_step)}B)." if summary["replicas"] > 1 else ".")
    )
    other = next(method for method in COMPARE_WITH if method != recipe.sync.method)
    board = f" · tensorboard --logdir {recipe.run.out_dir}" if recipe.log.tensorboard else ""
    return [
        happened,
        sent,
        f"Look at {directory.plot}{board} · next: add sync.method={other} run.name={other}",
    ]
