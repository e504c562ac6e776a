"""Text generation with a trained model."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from llmtrain.errors import UserError
from llmtrain.export.export import exported
from llmtrain.export.quiet import without_progress_bars


@dataclass(frozen=True)
class Sampling:
    """Sampling parameters for text generation."""

    tokens: int = 120
    """Maximum number of new tokens; fewer if the text ends or the model's positions run out."""
    temperature: float = 0.7
    """Sampling temperature; 0: greedy decoding."""
    top_k: int = 40
    """Number of most likely tokens to sample from; 0: all tokens."""
    seed: int = 0


def generate(run_or_export: Path, prompt: str, sampling: Sampling, step: int | None = None) -> str:
    """Return `prompt` followed by the model's continuation.

    The model is in a folder that transformers loads, or in a run, which is exported if necessary (after `step`, or
    at its newest checkpoint). Raises UserError if the prompt does not fit, or if it is empty and the model has no
    begin-of-sequence token.
    """
    folder = run_or_export if (run_or_export / "config.json").is_file() else exported(run_or_export, step)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    with without_progress_bars():
        model = AutoModelForCausalLM.from_pretrained(folder, dtype="auto").to(device).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    ids = tokenizer(prompt, add_special_tokens=False)["input_ids"]
    begin = model.generation_config.bos_token_id
    inputs = torch.tensor([ids if begin is None else [begin, *ids]], dtype=torch.long, device=device)
    room = getattr(model.config, "max_position_embeddings", None)
    tokens = sampling.tokens if room is None else min(sampling.tokens, room - inputs.shape[1])
    if tokens < 1:
        raise UserError(
            f"--prompt has {inputs.shape[1]} tokens, the model has room for {room} and has to write one; shorten it"
        )
    if not inputs.shape[1]:
        raise UserError("--prompt is empty and this model has no token that begins a text; give a word")
    drawn = {"do_sample": True, "temperature": sampling.temperature, "top_k": sampling.top_k}
    torch.manual_seed(sampling.seed)
    written = model.generate(
        inputs,
        attention_mask=torch.ones_like(inputs),
        max_new_tokens=tokens,
        **(drawn if sampling.temperature > 0 else {"do_sample": False}),
    )
    return prompt + tokenizer.decode(written[0, inputs.shape[1] :], skip_special_tokens=True)
