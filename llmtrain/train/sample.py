"""Text that the model generates during training and at its end, so that the user can watch it learn."""

from __future__ import annotations

import torch

from llmtrain.config import Recipe
from llmtrain.data.dataset import TokenDataset
from llmtrain.errors import first_line
from llmtrain.model import model_config
from llmtrain.parallel.engine import Engine
from llmtrain.parallel.mesh import Mesh
from llmtrain.seeding import derive_seed
from llmtrain.train.loggers import Console

CHEAP_READS = 5e9
"""Product of parameters and generated tokens up to which a text is generated at each validation. At this product,
generation takes two to five seconds on a CPU."""


class Sampler:
    """Generator of a text that continues `eval.sample_prompt`, on the main rank's CPU, with the engine's current
    weights. It draws the same random numbers each time, and does not change the random number generators of
    training."""

    def __init__(self, recipe: Recipe, engine: Engine, mesh: Mesh, prepared: TokenDataset, console: Console, size: int):
        """Prepare for a model of `size` parameters."""
        self.recipe, self.engine, self.mesh, self.prepared, self.console = recipe, engine, mesh, prepared, console
        self.is_wanted = recipe.eval.sample_prompt is not None
        self.is_cheap = self.is_wanted and size * recipe.eval.sample_tokens <= CHEAP_READS
        """True if a text is generated at each validation, and not only at the end."""

    def generate(self) -> str | None:
        """Return the text on the main rank, or None if it could not be generated, which never ends the run. Other ranks return
        None, without waiting for the text. A collective of each shard group."""
        weights = self.engine.full_weights()
        if not self.mesh.is_main:
            return None
        try:
            with self.console.progress("generating a sample"), torch.random.fork_rng(devices=[]):
                return self._continue_prompt(weights)
        except Exception as error:
            self.console.print(f"warning: no sample could be generated ({first_line(error)})")
            return None

    def generate_in_step(self) -> str | None:
        """Return the text of `generate` on every rank. All ranks wait for it, so that none counts the wait as training
        time. A collective of all ranks."""
        text = self.generate()
        return self.mesh.broadcast_from_main(lambda: text)

    def _continue_prompt(self, weights: dict[str, torch.Tensor]) -> str:
        from transformers import AutoModelForCausalLM

        recipe, prepared = self.recipe, self.prepared
        config = model_config(recipe.model, prepared.vocab_size)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
        model.load_state_dict(weights, strict=False)
        tokenizer = prepared.load_tokenizer()
        prompt = recipe.eval.sample_prompt or ""
        ids = tokenizer(prompt, add_special_tokens=False, split_special_tokens=True)["input_ids"]  # as in training
        inputs = torch.tensor([[prepared.eos_id, *ids]])
        # Unlike torch.manual_seed, this leaves the generators of GPUs alone.
        torch.default_generator.manual_seed(derive_seed(recipe.run.seed, "sample"))
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
