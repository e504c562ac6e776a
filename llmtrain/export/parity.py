"""Parity checks: the logits and token ids of an exported model must match those of the trained model."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn
from transformers import AutoModelForCausalLM, AutoTokenizer, PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils import logging

from llmtrain.data.tokenizing import encode
from llmtrain.errors import TrainingError
from llmtrain.export.source import ChosenWeights
from llmtrain.model import PREFIX, LanguageModel, build, named_weights

TOLERANCE = 1e-5
"""Largest allowed logit difference relative to the largest logit; both models compute in fp32 with the same weights."""
POSITIONS = 512
"""Number of fixed tokens that both models read; fewer if the model has fewer positions."""
TEXTS = (
    "Once upon a time, there was a fox.\n\n  It said: “Où est l'été?” – 42,5 % of the time.\t",
    "def f(x):\n    return [y ** 2 for y in x if y != 0]  # squares\r\n",
    "日本語 🦊 e\u0301 \u00a0\u2028\x00",
    " leading and trailing spaces  ",
)
"""Texts that both tokenizers encode and decode, besides one that spells out the special tokens."""


@dataclass(frozen=True)
class Parity:
    """Difference between the logits of the exported model and the training model."""

    difference: float
    """Largest absolute difference between corresponding logits."""
    scale: float
    """Largest absolute logit."""
    rounding: float | None = None
    """Largest change of a logit from rounding the weights to bf16; None in fp32."""

    @property
    def relative(self) -> float:
        """Return the difference as a fraction of the scale, 0 if all logits are 0."""
        return self.difference / self.scale if self.scale else 0.0

    def describe(self) -> str:
        """Return the result as one line of text."""
        line = (
            f"largest logit difference to the training model: {self.difference:.1e}, {self.relative:.1e} of the largest "
            f"logit (allowed: {TOLERANCE:.0e})"
        )
        if self.rounding is None:
            return line
        return f"{line}; rounding to bf16 moved logits by up to {self.rounding:.1e}, {Parity(self.rounding, self.scale).relative:.1e}"


def check_logits(config: PretrainedConfig, weights: ChosenWeights, folder: Path, dtype: torch.dtype) -> Parity:
    """Compare the logits of the model in `folder` with those of the training modules, on fixed tokens.

    The training modules are built from `config` with `weights`, rounded to `dtype`. Only one of the two models is
    in memory at a time. Raises TrainingError if the difference exceeds the tolerance.
    """
    length = min(POSITIONS, getattr(config, "max_position_embeddings", None) or POSITIONS)
    tokens = (torch.arange(length) * 7919 + 13)[None] % config.vocab_size
    model = training_model(config, weights)
    expected, rounding = training_logits(model, tokens), None
    if dtype != torch.float32:
        exact = expected
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.copy_(parameter.to(dtype))
        expected = training_logits(model, tokens)
        rounding = (expected - exact).abs().max().item()
    del model
    exported = load_exported(folder)
    with torch.no_grad():
        difference = (exported(tokens, use_cache=False).logits - expected).abs().max().item()
    parity = Parity(difference, expected.abs().max().item(), rounding)
    if not parity.difference <= TOLERANCE * parity.scale:  # also if either is NaN
        raise TrainingError(
            f"the exported model is not the trained one: {parity.describe()}; nothing was written, please report this model's config"
        )
    return parity


def check_tokenizer(trained_with: PreTrainedTokenizerBase, folder: Path) -> None:
    """Raise TrainingError unless the tokenizer in `folder`, as transformers loads it, encodes as the training data was encoded, with
    and without `add_special_tokens=False`, and decodes as the training tokenizer does."""
    exported = AutoTokenizer.from_pretrained(folder)
    spelled = " or ".join({"<unk>": 0, **dict.fromkeys(map(str, trained_with.all_special_tokens))})
    for text, encoded in zip((*TEXTS, spelled), encode(trained_with, [*TEXTS, spelled]), strict=True):
        ids = list(encoded if isinstance(encoded, list) else encoded.ids)
        is_same = exported(text, add_special_tokens=False)["input_ids"] == ids == exported(text)["input_ids"]
        if not is_same or exported.decode(ids) != trained_with.decode(ids):
            raise TrainingError(
                f"the exported tokenizer differs from the training tokenizer on {text!r}; nothing was written, please report "
                f"this tokenizer ({type(trained_with).__name__}, exported as {type(exported).__name__})"
            )


def training_model(config: PretrainedConfig, weights: ChosenWeights) -> LanguageModel:
    """Return the modules that training runs, with `weights`, on the CPU in fp32."""
    model = build(config, loss_chunk=POSITIONS)
    given: dict[int, nn.Parameter] = {}
    for name, owner, key, parameter in list(named_weights(model)):
        if id(parameter) not in given:  # a tied weight is stored under the first of its names
            given[id(parameter)] = nn.Parameter(weights.read(name.removeprefix(PREFIX)), requires_grad=False)
        setattr(owner, key, given[id(parameter)])
    return model.eval()


@torch.no_grad()
def training_logits(model: LanguageModel, tokens: torch.Tensor) -> torch.Tensor:
    """Return logits [B, T, vocabulary], computed along the path of the training loss."""
    return model.causal_lm.get_output_embeddings()(model.hidden(tokens))


def load_exported(folder: Path) -> PreTrainedModel:
    """Load the model in an exported folder in fp32.

    Raises TrainingError unless the folder has exactly the model's weights.
    """
    with without_progress_bars():
        model, loading = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, output_loading_info=True)
    wrong = {kind: sorted(map(str, names)) for kind, names in loading.items() if kind.endswith("_keys") and names}
    if wrong:
        raise TrainingError(f"transformers does not find the exported model's weights by their names: {wrong}")
    return model.eval()


@contextmanager
def without_progress_bars() -> Iterator[None]:
    """Disable transformers' progress bars, and restore their setting afterward."""
    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()
