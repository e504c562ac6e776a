"""Proof that an exported folder is the model that was trained: logits and token ids of both, compared."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import nn
from transformers import AutoModelForCausalLM, AutoTokenizer, PretrainedConfig, PreTrainedModel

from llmtrain.errors import TrainingError
from llmtrain.export.quiet import without_progress_bars
from llmtrain.export.weights import PREFIX, ChosenWeights
from llmtrain.model import LanguageModel, build, named_weights

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

TOLERANCE = 1e-5
"""Largest logit difference over the largest logit, both models computing in fp32 with the same weights."""
POSITIONS = 512
"""Of the fixed tokens that both models read; fewer where the model has fewer."""
TEXTS = (
    "Once upon a time, there was a fox.\n\n  It said: “Où est l'été?” – 42,5 % of the time.\t",
    "def f(x):\n    return [y ** 2 for y in x if y != 0]  # squares\r\n",
    "日本語 🦊 e\u0301 \u00a0\u2028\x00",
    " leading and trailing spaces  ",
)
"""What both tokenizers encode and decode."""


@dataclass(frozen=True)
class Parity:
    """The exported model against the training model."""

    difference: float
    """Largest difference of two logits."""
    scale: float
    """Largest logit."""
    rounding: float | None = None
    """Largest change of a logit by rounding the weights to bf16; None in fp32."""

    @property
    def relative(self) -> float:
        """The difference as a share of the scale."""
        return self.difference / self.scale

    def describe(self) -> str:
        """One line for people."""
        line = (
            f"largest logit difference to the training model: {self.difference:.1e}, {self.relative:.1e} of the largest "
            f"logit (allowed: {TOLERANCE:.0e})"
        )
        if self.rounding is None:
            return line
        return f"{line}; rounding to bf16 moved logits by up to {self.rounding:.1e}, {self.rounding / self.scale:.1e}"


def check_logits(config: PretrainedConfig, weights: ChosenWeights, folder: Path, dtype: torch.dtype) -> Parity:
    """Compare the logits of the model in `folder` with the training model's modules, built from `config` and fed
    `weights`, on fixed tokens; in bf16 they are fed the rounded weights. One of the two is in memory at a time.
    Raises TrainingError beyond the tolerance."""
    length = min(POSITIONS, getattr(config, "max_position_embeddings", POSITIONS))
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
    if not parity.difference <= TOLERANCE * parity.scale:  # also where either is not a number
        raise TrainingError(
            f"the exported model is not the trained one: {parity.describe()}; nothing was kept, please report this model's config"
        )
    return parity


def check_tokenizer(trained_with: PreTrainedTokenizerBase, folder: Path) -> None:
    """Raises TrainingError unless the tokenizer in `folder` gives the ids that training saw."""
    exported = AutoTokenizer.from_pretrained(folder)
    for text in TEXTS:
        ids = trained_with(text, add_special_tokens=False)["input_ids"]
        is_same = exported(text, add_special_tokens=False)["input_ids"] == ids
        if not is_same or exported.decode(ids) != trained_with.decode(ids):
            raise TrainingError(
                f"the exported tokenizer is not the one of training: they differ on {text!r}; nothing was kept, please report "
                f"this tokenizer ({type(trained_with).__name__}, exported as {type(exported).__name__})"
            )


def training_model(config: PretrainedConfig, weights: ChosenWeights) -> LanguageModel:
    """The modules that training runs, with `weights`, on the CPU in fp32."""
    model = build(config, loss_chunk=POSITIONS)
    given: dict[int, nn.Parameter] = {}
    for name, owner, key, parameter in list(named_weights(model)):
        if id(parameter) not in given:  # a tied weight is stored under the first of its names
            given[id(parameter)] = nn.Parameter(weights.read(name.removeprefix(PREFIX)), requires_grad=False)
        setattr(owner, key, given[id(parameter)])
    return model.eval()


@torch.no_grad()
def training_logits(model: LanguageModel, tokens: torch.Tensor) -> torch.Tensor:
    """Logits [B, T, vocabulary] by the path that training's loss takes."""
    return model.causal_lm.get_output_embeddings()(model.hidden(tokens))


def load_exported(folder: Path) -> PreTrainedModel:
    """The model in an exported folder, in fp32. Raises TrainingError if the folder has not exactly its weights."""
    with without_progress_bars():
        model, loading = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, output_loading_info=True)
    wrong = {kind: sorted(map(str, names)) for kind, names in loading.items() if kind.endswith("_keys") and names}
    if wrong:
        raise TrainingError(f"transformers does not find the exported model's weights by their names: {wrong}")
    return model.eval()
