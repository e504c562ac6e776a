"""EDiT between replicas that are sharded with FSDP2: two replicas of two ranks each.

The model learns to predict the next byte of this file. Run it with

    torchrun --nproc-per-node 4 examples/fsdp2_loop.py
"""

import os
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from transformers import AutoModelForCausalLM, LlamaConfig

from llmtrain.sync import LocalUpdates

SIZES = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 3, "num_attention_heads": 4}


def main(steps: int = 40, replicas: int = 2) -> nn.Module:
    """Train this process's shard of one of `replicas` replicas, and return the model."""
    device = "cpu"
    if torch.cuda.is_available():
        device = "cuda"
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", 0)))
    # Messages between replicas are in flight while FSDP2 gathers. NCCL may deadlock unless all GPUs start both in the same order.
    os.environ.setdefault("NCCL_LAUNCH_ORDER_IMPLICIT", "1")
    if not dist.is_initialized():
        dist.init_process_group("nccl" if device == "cuda" else "gloo")
    mesh = init_device_mesh(device, (replicas, dist.get_world_size() // replicas), mesh_dim_names=("replica", "shard"))
    torch.manual_seed(0)  # all replicas must start with the same parameters
    model = AutoModelForCausalLM.from_config(LlamaConfig(vocab_size=256, **SIZES)).to(device)
    for layer in [*model.model.layers, model]:
        fully_shard(layer, mesh=mesh["shard"])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    groups = {"replicas": mesh.get_group("replica"), "shards": mesh.get_group("shard")}
    # Rounds of 10 steps begin after 5 synchronous steps. EDiT's own schedule works in the forward pass, where FSDP2 may
    # already have gathered parameters, so a sharded module needs "blocking".
    choices = {"period": {"every": 10}, "warmup_steps": 5, "schedule": "blocking", "wire": "int8"}
    updates = LocalUpdates(model, optimizer, "edit", **groups, **choices)

    text = torch.tensor(list(Path(__file__).read_bytes()), device=device)
    torch.manual_seed(1 + dist.get_rank())  # every rank trains on different samples
    for step in range(1, steps + 1):
        starts = torch.randint(len(text) - 32, (8, 1), device=device)
        sequences = text[starts + torch.arange(32, device=device)]
        loss = model(input_ids=sequences, labels=sequences).loss
        loss.backward()
        optimizer.step()  # the hooks of LocalUpdates average gradients before it, or synchronize after it
        optimizer.zero_grad()
        if step % 10 == 0 and dist.get_rank() == 0:
            print(f"step {step} loss {loss.item():.3f} rounds {updates.report().count}")
    updates.finish()  # synchronizes the last, shorter round, so that all replicas are equal
    return model


if __name__ == "__main__":
    main()
    dist.destroy_process_group()
