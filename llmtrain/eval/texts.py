"""Losses on text files, and texts that the model writes.

The protocol: documents are tokenized without special tokens, joined with the tokenizer's begin-of-sequence token (or, if
there is none, end-of-sequence) before each, and cut into windows without overlap. In a window the model predicts each
next token, the last one's being the first of the next window; so every token but the very first is predicted once. What
a document costs are its own tokens and the one that follows them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from llmtrain.errors import DataError, ModelError
from llmtrain.eval.cache import Entry
from llmtrain.eval.scores import bits_per_byte, ratio
from llmtrain.export.quiet import without_progress_bars
from llmtrain.suites.suite import SamplesSection, TextSection

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

PROTOCOL = 1
"""Changes when losses do."""
LONGEST_WINDOW = 2048
LOGITS_AT_ONCE = 2**28
"""Numbers in the largest tensor, 1 GiB in fp32."""


@dataclass(frozen=True)
class Loaded:
    """A model, ready to compute."""

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase

    @property
    def first_token(self) -> int:
        """What a text begins with. Raises ModelError if the tokenizer has no such token."""
        ids = (self.tokenizer.bos_token_id, self.tokenizer.eos_token_id)
        found = next((one for one in ids if one is not None), None)
        if found is None:
            raise ModelError(
                f"{self.tokenizer.name_or_path}: the tokenizer has neither bos nor eos token, of which a text needs one"
            )
        return found


def load(folder: Path, device: str | None) -> Loaded:
    """The model in the precision of its files."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    with without_progress_bars():
        model = AutoModelForCausalLM.from_pretrained(folder, dtype="auto").eval()
    model.to(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    return Loaded(model, AutoTokenizer.from_pretrained(folder))


def documents(text: str, separator: str, every: int, limit: int | None) -> list[str]:
    """Without white space around them, and without empty ones."""
    found = [piece.strip() for piece in text.split(separator)]
    return [piece for piece in found if piece][::every][:limit]


def evaluate_text(section: TextSection, path: Path, limit: int | None, loaded: Loaded, batch_size: int) -> Entry:
    """Loss (nats per token), perplexity and bits per byte (summed nats / ln 2 / UTF-8 bytes of the documents) with
    standard errors over documents. Raises DataError for a file without documents."""
    try:
        texts = documents(path.read_text(), section.separator, section.every, limit)
    except UnicodeDecodeError as error:
        raise DataError(f"{path} is not UTF-8 text ({error.reason}); convert it first") from None
    if not texts:
        raise DataError(f"{path} has no text between its separators ({section.separator!r}); give another file")
    window = section.window or min(
        getattr(loaded.model.config, "max_position_embeddings", LONGEST_WINDOW), LONGEST_WINDOW
    )
    nll, tokens = losses(texts, loaded, window, batch_size)
    sizes = [len(text.encode()) for text in texts]
    loss, loss_error = ratio(nll, tokens)
    bits, bits_error = bits_per_byte(nll, sizes)
    perplexity = math.exp(min(loss, 700.0))
    scores = {
        "loss": loss,
        "loss_stderr": loss_error,
        "perplexity": perplexity,
        "perplexity_stderr": None if loss_error is None else perplexity * loss_error,
        "bits_per_byte": bits,
        "bits_per_byte_stderr": bits_error,
        "n": len(texts),
        "tokens": sum(tokens),
        "bytes": sum(sizes),
    }
    return Entry(
        scores={section.name: scores},
        about={section.name: {"version": PROTOCOL, "window": window, "members": [section.name]}},
        shown=[section.name],
        answers={section.name: {"doc": list(range(len(texts))), "nll": nll, "tokens": tokens, "bytes": sizes}},
    )


@torch.inference_mode()
def losses(texts: Sequence[str], loaded: Loaded, window: int, batch_size: int) -> tuple[list[float], list[int]]:
    """Of each document: its summed loss in nats, and the tokens predicted for it."""
    encoded = loaded.tokenizer(list(texts), add_special_tokens=False, verbose=False)["input_ids"]
    stream = torch.tensor([token for ids in encoded for token in (loaded.first_token, *ids)])
    lengths = torch.tensor([len(ids) + 1 for ids in encoded])
    owner = torch.repeat_interleave(torch.arange(len(encoded)), lengths)[:-1]  # of the input: who is being read
    inputs, targets = stream[:-1], stream[1:]
    whole = len(inputs) // window * window
    rows = max(1, min(batch_size, LOGITS_AT_ONCE // (window * loaded.model.config.vocab_size)))
    parts = [slice(start, min(start + rows * window, whole)) for start in range(0, whole, rows * window)]
    batches = [(inputs[part].view(-1, window), targets[part].view(-1, window)) for part in parts]
    if whole < len(inputs):
        batches.append((inputs[None, whole:], targets[None, whole:]))
    costs = torch.cat([_costs(loaded.model, *batch) for batch in batches])
    nll = torch.zeros(len(encoded), dtype=torch.float64).index_add_(0, owner, costs)
    return nll.tolist(), torch.bincount(owner, minlength=len(encoded)).tolist()


def write_samples(section: SamplesSection, loaded: Loaded) -> Entry:
    """Let the model continue each prompt."""
    written = []
    for prompt in section.prompts:
        ids = [loaded.first_token, *loaded.tokenizer(prompt, add_special_tokens=False)["input_ids"]]
        inputs = torch.tensor([ids], device=loaded.model.device)
        torch.manual_seed(section.seed)
        room = getattr(loaded.model.config, "max_position_embeddings", LONGEST_WINDOW) - len(ids)
        output = loaded.model.generate(
            inputs,
            attention_mask=torch.ones_like(inputs),
            max_new_tokens=max(1, min(section.tokens, room)),
            do_sample=True,
            temperature=section.temperature,
            top_k=section.top_k,
            eos_token_id=loaded.tokenizer.eos_token_id,
            pad_token_id=loaded.first_token,
        )
        text = loaded.tokenizer.decode(output[0, 1:].tolist(), skip_special_tokens=True)
        written.append({"prompt": prompt, "text": text})
    return Entry(written=written)


def _costs(model: PreTrainedModel, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Loss of each token, one after the other, on the CPU in fp64."""
    logits = model(inputs.to(model.device), use_cache=False).logits
    costs = [
        torch.nn.functional.cross_entropy(of_row.float(), row.to(model.device), reduction="none")
        for of_row, row in zip(logits, targets, strict=True)
    ]
    return torch.cat(costs).double().cpu()
