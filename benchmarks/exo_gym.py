"""Training in EXO Gym's simulator (https://github.com/exo-explore/gym), for in_process.py.

    PYTHONPATH=FOLDER python benchmarks/exo_gym.py         # FOLDER: a checkout of EXO Gym; writes logs/ where it is started

Trains the study's model on random tokens with EXO Gym's own trainer and DiLoCo strategy, unchanged: one process per node, on the
CPU, without validation or checkpoints. Prints one line of JSON: the tokens per second of all nodes between two steps, the peak
memory of the largest node in GiB, and the seconds from the start of this process to the end of the first step.
"""

from __future__ import annotations

import inspect
import json
import resource
import tempfile
import time
from argparse import ArgumentParser, Namespace, RawDescriptionHelpFormatter
from functools import partial
from pathlib import Path
from typing import Any

import torch
import yaml

from llmtrain.parallel.network import unused_port
from llmtrain.startup import seconds_since_command

STUDY: dict[str, Any] = yaml.safe_load((Path(__file__).resolve().parent / "study" / "study.yaml").read_text())
LENGTH: int = STUDY["train"]["sequence_length"]
VOCABULARY = 1024
"""Number of tokens of the study's tokenizer."""
CLIP_NORM, BETAS, WEIGHT_DECAY = 1.0, (0.9, 0.95), 0.1
"""Defaults of llmtrain's recipes."""
OUTER = {"lr": 0.7, "momentum": 0.9, "nesterov": True}
"""Defaults of DiLoCo, here and in EXO Gym."""


def options_of(arguments: list[str] | None = None) -> Namespace:
    """Return the parsed command line, or parsed `arguments`."""
    parser = ArgumentParser(description=__doc__, formatter_class=RawDescriptionHelpFormatter)
    parser.add_argument("--nodes", type=int, default=4)
    parser.add_argument("--batch", type=int, default=16, help="sequences per step and node")
    parser.add_argument("--every", type=int, default=10, help="local steps per round")
    parser.add_argument("--lr", type=float, default=0.008)
    parser.add_argument("--warmup", type=int, default=4, help="steps of linear warm-up")
    parser.add_argument("--first", type=int, default=10, help="step at whose end the measurement starts")
    parser.add_argument("--last", type=int, default=40, help="step at whose end it stops")
    return parser.parse_args(arguments)


class TimedLoss(torch.nn.Module):
    """Model that returns its mean loss on a batch, as EXO Gym expects, and notes when a node's steps begin."""

    def __init__(self, model: torch.nn.Module, noted: tuple[int, ...], folder: str):
        """Note when each of the steps `noted` (from 1) begins. When the last of them begins, write these times to `folder`."""
        super().__init__()
        self.model, self.noted, self.folder = model, noted, folder
        self.steps = 0
        self.began: dict[int, float] = {}

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        """Return the mean loss of `batch`, [sequences, T + 1], of which the model reads T tokens."""
        self.steps += 1
        if self.steps in self.noted:
            self.began[self.steps] = time.time()
        if self.steps == self.noted[-1]:
            found = {"began": self.began, "peak": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024}
            (Path(self.folder) / f"{torch.distributed.get_rank()}.json").write_text(json.dumps(found))
        labels = batch[:, 1:].contiguous()
        return self.model(batch[:, :-1], labels=labels, shift_labels=labels, use_cache=False).loss


def random_tokens(rows: int, length: int, rank: int, num_nodes: int, train_dataset: bool) -> torch.Tensor:
    """Return a node's own sequences, [rows, length]. EXO Gym calls this on each node, and passes the last three arguments."""
    generator = torch.Generator().manual_seed(rank)
    return torch.randint(VOCABULARY, (rows, length), generator=generator)


def train(options: Namespace, folder: str) -> None:
    """Train with EXO Gym until one step after the last measured one. Each node writes its measurements to `folder`."""
    from exogym.strategy.diloco import DiLoCoStrategy
    from exogym.strategy.optim import OptimSpec
    from exogym.trainer import Trainer
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    llama = LlamaForCausalLM(LlamaConfig(**STUDY["model"]["config"], vocab_size=VOCABULARY))
    model = TimedLoss(llama, (2, options.first + 1, options.last + 1), folder)
    steps = options.last + 1
    data = partial(random_tokens, steps * options.batch, LENGTH + 1)
    inner = {"lr": options.lr, "betas": BETAS, "weight_decay": WEIGHT_DECAY, "fused": True}
    strategy = DiLoCoStrategy(
        optim_spec=OptimSpec(torch.optim.AdamW, **inner),
        outer_optim_spec=OptimSpec(torch.optim.SGD, **OUTER),
        H=options.every,
        max_norm=CLIP_NORM,
        lr_scheduler="lambda_cosine",
        lr_scheduler_kwargs={"warmup_steps": options.warmup, "cosine_anneal": True},
    )
    of_trainer: dict[str, Any] = {"start_port": unused_port()}
    of_fit: dict[str, Any] = {"batch_size": options.batch, "minibatch_size": options.batch, "val_size": 0}
    # Later versions of EXO Gym choose the device when the trainer is built.
    chooser = of_fit if "device" in inspect.signature(Trainer.fit).parameters else of_trainer
    chooser["device"] = "cpu"
    trainer = Trainer(model, data, data, **of_trainer)
    trainer.fit(num_epochs=1, max_steps=steps, strategy=strategy, num_nodes=options.nodes, run_name="run", **of_fit)


def summary(options: Namespace, folder: str) -> dict[str, float]:
    """Return the measurements from the nodes' files in `folder`. A step ends when the next one has begun on every node.

    Raises SystemExit if a node has written nothing."""
    found = [json.loads(path.read_text()) for path in Path(folder).glob("*.json")]
    if len(found) != options.nodes:
        raise SystemExit(f"{len(found)} of {options.nodes} nodes have trained; see their output")
    ended = {step: max(node["began"][str(step + 1)] for node in found) for step in (1, options.first, options.last)}
    tokens = (options.last - options.first) * options.batch * LENGTH * options.nodes
    return {
        "tokens_per_second": tokens / (ended[options.last] - ended[options.first]),
        "largest_gib": max(node["peak"] for node in found) / 2**30,
        "first_step_seconds": seconds_since_command() - (time.time() - ended[1]),
    }


def main() -> None:
    """Train, and print the measurements."""
    options = options_of()
    with tempfile.TemporaryDirectory() as folder:
        train(options, folder)
        print(json.dumps(summary(options, folder)))


if __name__ == "__main__":
    main()
