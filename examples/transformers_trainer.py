"""Streaming DiLoCo with transformers' Trainer: every process is a replica, and its Trainer sees no other process.

The model learns to predict the next byte of this file. Run it with

    torchrun --nproc-per-node 2 examples/transformers_trainer.py

On machines with GPUs, add --virtual-local-rank, so that each process sees only one GPU: Trainer uses all GPUs that it sees. Between
hosts, set GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME to the network interface.
"""

import os
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from transformers import AutoModelForCausalLM, LlamaConfig, Trainer, TrainerCallback, TrainingArguments, set_seed

from llmtrain.sync import LocalUpdates

SIZES = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 3, "num_attention_heads": 4}


class LocalUpdatesCallback(TrainerCallback):
    """Callback that attaches `LocalUpdates` to the Trainer's optimizer before the first step, and finishes it after the
    last."""

    def __init__(self, **choices: Any):
        self.choices = choices

    def on_train_begin(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        if args.load_best_model_at_end:
            raise ValueError("load_best_model_at_end loads a replica's own checkpoint before the last synchronization")
        if args.n_gpu > 1:  # Trainer then divides batches among all GPUs, in every process
            raise ValueError(
                f"this process sees {args.n_gpu} GPUs, expected one; start torchrun with --virtual-local-rank"
            )
        # The second .optimizer is torch's own, inside Accelerate's wrapper.
        self.updates = LocalUpdates(given["model"], given["optimizer"].optimizer, **self.choices)

    def on_train_end(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        self.updates.finish()


def main(output_dir: str = "runs/trainer", steps: int = 40) -> nn.Module:
    """Train a replica in this process, and return the model."""
    on_gpu = torch.cuda.is_available()
    if not dist.is_initialized():
        dist.init_process_group("nccl" if on_gpu else "gloo")
    # With torchrun's variables, Trainer would average gradients over all processes in every step.
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        os.environ.pop(name, None)
    set_seed(0)  # all replicas must start with the same parameters
    model = AutoModelForCausalLM.from_config(LlamaConfig(vocab_size=256, **SIZES))
    text = torch.tensor(list(Path(__file__).read_bytes()))
    rows = [{"input_ids": row, "labels": row} for row in text.unfold(0, 32, 1)]
    mine = rows[dist.get_rank() :: dist.get_world_size()]
    choices = {"period": {"every": 12}, "schedule": {"steps": 3, "fragments": 3}, "warmup_steps": 4}
    arguments = TrainingArguments(
        output_dir=output_dir,
        max_steps=steps,
        per_device_train_batch_size=8,
        use_cpu=not on_gpu,
        report_to="none",
        save_strategy="no",
    )
    callback = LocalUpdatesCallback(method="streaming_diloco", **choices)
    Trainer(model, arguments, train_dataset=mine, callbacks=[callback]).train()
    return model


if __name__ == "__main__":
    main()
    dist.destroy_process_group()
