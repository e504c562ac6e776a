"""Validation loss of the replicas' mean, or of the anchor, on fixed texts. Validation never changes the run."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field

import torch

from llmtrain.loss import IGNORE_INDEX
from llmtrain.parallel.engine import Engine
from llmtrain.parallel.mesh import Mesh
from llmtrain.sync.anchors import flat_view, flatten, unflatten_into
from llmtrain.train.loggers import Console
from llmtrain.train.sample import Sampler

Batches = Iterable[tuple[torch.Tensor, torch.Tensor]]
"""Pairs (input_ids, labels), each [micro_batch, T]: this rank's part, with the same number of pairs on every rank unless each site
has a text of its own."""


@dataclass(frozen=True)
class Validation:
    """Mean loss in nats per token, over `tokens` tokens."""

    loss: float
    tokens: int
    parts: Mapping[str, float] = field(default_factory=dict)
    """Loss of each part, if the text has parts."""

    @property
    def perplexity(self) -> float:
        """Return exp(loss), with the loss capped at 700 to avoid overflow."""
        return math.exp(min(self.loss, 700.0))


@dataclass(frozen=True)
class ValidationSet:
    """Text on which a run is validated. The run's own text has an empty name."""

    name: str
    batches: Callable[[], Batches]
    """Function that returns an iterable of this rank's batches. Each call begins with the first batch."""
    bytes_per_token: float
    """UTF-8 bytes of the text divided by its tokens. NaN for a text with parts."""
    parts: Sequence[ValidationSet] = ()
    """Parts of this text: the texts of a mixture or of the sites. A text with parts has no batches of its own."""
    share: float = 1.0
    """If this text is a part, the weight of its loss in the loss of the text to which it belongs."""

    def tags(self, found: Validation) -> dict[str, float]:
        """Return the tags to log: loss, perplexity and bits per byte under `eval/`, or under `eval/<name>/`."""
        prefix = f"eval/{self.name}/" if self.name else "eval/"
        return {
            f"{prefix}loss": found.loss,
            f"{prefix}ppl": found.perplexity,
            f"{prefix}bpb": self.bits_per_byte(found),
        }

    def bits_per_byte(self, found: Validation) -> float:
        """Return the bits per byte of the text; for a text with parts, the mean of the parts' bits per byte, weighted by share.
        The loss of all parts divided by their bytes would depend on the tokenizer, which decides how many bytes a token of each
        part has."""
        if not self.parts:
            return found.loss / math.log(2) / self.bytes_per_token
        bits = (part.share * found.parts[part.name] / math.log(2) / part.bytes_per_token for part in self.parts)
        return sum(bits) / sum(part.share for part in self.parts)


def weighted_mean(parts: Sequence[ValidationSet], found: Sequence[Validation]) -> Validation:
    """Return the mean of the losses `found` for the parts, weighted by the parts' shares."""
    loss = sum(part.share * one.loss for part, one in zip(parts, found, strict=True))
    losses = {part.name: one.loss for part, one in zip(parts, found, strict=True)}
    return Validation(loss / sum(part.share for part in parts), sum(one.tokens for one in found), losses)


def joined(parts: Sequence[ValidationSet]) -> ValidationSet:
    """Return the run's own validation text, which consists of these parts."""
    return ValidationSet("", tuple, math.nan, tuple(parts))


@contextmanager
def validated_parameters(engine: Engine, mesh: Mesh, given: Sequence[torch.Tensor] | None = None) -> Iterator[None]:
    """Set the engine's parameters, within this context, to `given`, a flat tensor for each block, or else to the mean over
    replicas. On exit, this replica's own parameters are restored bit for bit. A collective of all ranks."""
    # Bytes sent for validation are not the method's traffic. They count with those of metrics.
    replica = mesh.replica_comms.with_own_traffic()
    # Copies from and to a GPU use pinned memory and run in stream order, so that the host need not wait for them.
    own = [flatten(block).to("cpu", non_blocking=True) for block in engine.blocks]
    for index, block in enumerate(engine.blocks):
        if given is None:
            flat = replica.all_reduce(flat_view(block) / replica.size, f"averaging {block.name} for validation")
        else:
            flat = given[index].to(mesh.device)
        unflatten_into(flat, block)
        engine.parameters_changed(block)
    mesh.all_ranks.traffic.bytes += replica.traffic.bytes
    try:
        yield
    finally:
        for block, parameters in zip(engine.blocks, own, strict=True):
            unflatten_into(parameters.to(mesh.device, non_blocking=True), block)
            engine.parameters_changed(block)


def validate(
    engine: Engine, mesh: Mesh, texts: Sequence[Callable[[], Batches]], advance: Callable[[], None] = lambda: None
) -> list[Validation]:
    """Return, for each text, the mean loss over all ranks' batches, with the engine's current parameters. A rank may have no
    batches of a text. Calls `advance` after each batch. Losses are summed over ranks once, after the last batch, so that a
    replica never waits within a text that others do not read. A collective of all ranks."""
    summed = torch.zeros(len(texts), dtype=torch.float64, device=mesh.device)
    counted = torch.zeros(len(texts), dtype=torch.float64)
    with engine.eval_mode() as summed_loss:
        for number, batches in enumerate(texts):
            for input_ids, labels in batches():
                counted[number] += int((labels != IGNORE_INDEX).sum())
                # The sum stays on the device, and batches are pinned, so that the host can run ahead of it.
                if mesh.device.type == "cuda":
                    input_ids, labels = input_ids.pin_memory(), labels.pin_memory()
                summed[number] += summed_loss(input_ids, labels)
                advance()
    totals = torch.stack([summed.cpu(), counted], dim=1)
    found = mesh.all_ranks.all_reduce(totals, "summing validation losses").tolist()
    return [Validation(loss / tokens, int(tokens)) for loss, tokens in found]


class Validator:
    """Validation of a run on its own text and those of `eval.sets`, with a generated sample."""

    def __init__(self, engine: Engine, mesh: Mesh, sets: Sequence[ValidationSet], sampler: Sampler, console: Console):
        self.engine, self.mesh, self.sets, self.sampler, self.console = engine, mesh, sets, sampler, console
        self._batches: int | None = None  # of all texts, known after the first validation

    def run(
        self, is_synchronized: bool, with_sample: bool, given: Sequence[torch.Tensor] | None = None
    ) -> tuple[list[tuple[ValidationSet, Validation]], str | None]:
        """Return the loss on each text, and a text that the model generates if `with_sample` asks for it and it is cheap, else
        None. A collective of all ranks.

        The validated parameters are `given`, a flat tensor for each block, or else the replicas' mean, which is not computed if
        replicas are equal (`is_synchronized`).
        """
        keeps_parameters = given is None and (is_synchronized or self.mesh.replicas == 1)
        done = 0
        with nullcontext() if keeps_parameters else validated_parameters(self.engine, self.mesh, given):
            with self.console.progress("validating", self._batches) as show:

                def advance() -> None:
                    nonlocal done
                    done += 1
                    show()

                found = [pair for text in self.sets for pair in self.losses_of(text, advance)]
            self._batches = done
            with_sample = with_sample and self.sampler.is_cheap
            return found, self.sampler.generate_in_step() if with_sample else None

    def losses_of(
        self, text: ValidationSet, advance: Callable[[], None] = lambda: None
    ) -> list[tuple[ValidationSet, Validation]]:
        """Return a text and its parts, each with its loss, computed with the engine's current parameters. A collective
        of all ranks."""
        found = validate(self.engine, self.mesh, [part.batches for part in text.parts or [text]], advance)
        if not text.parts:
            return [(text, found[0])]
        return [(text, weighted_mean(text.parts, found)), *zip(text.parts, found, strict=True)]
