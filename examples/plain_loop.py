"""DiLoCo in a plain PyTorch loop: every process is a replica.

The model learns to predict the next byte of this file. Run it with

    torchrun --nproc-per-node 2 examples/plain_loop.py

With GPUs, each process takes one; CUDA_VISIBLE_DEVICES= hides them. Between hosts, set GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME to
the network interface.
"""

import os
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

from llmtrain.sync import LocalUpdates


def main(steps: int = 60) -> nn.Module:
    """Train a replica in this process, and return the model."""
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)))
        torch.cuda.set_device(device)  # before NCCL starts, which otherwise takes the same GPU in all processes
    if not dist.is_initialized():
        dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    torch.manual_seed(0)  # all replicas must start with the same parameters
    model = nn.Sequential(nn.Embedding(256, 64), nn.Flatten(), nn.Linear(8 * 64, 128), nn.ReLU(), nn.Linear(128, 256))
    model.to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    # Gradients are averaged over the replicas in the first 5 steps. After that, replicas synchronize every 20 steps.
    updates = LocalUpdates(model, optimizer, "diloco", period={"every": 20}, warmup_steps=5)

    text = torch.tensor(list(Path(__file__).read_bytes()), device=device)
    torch.manual_seed(1 + dist.get_rank())  # every replica trains on other samples
    for step in range(1, steps + 1):
        starts = torch.randint(len(text) - 8, (32, 1), device=device) + torch.arange(8, device=device)
        loss = nn.functional.cross_entropy(model(text[starts]), text[starts[:, -1] + 1])
        loss.backward()
        optimizer.step()  # the hooks of LocalUpdates average gradients before it, or synchronize after it
        optimizer.zero_grad()
        if step % 20 == 0 and dist.get_rank() == 0:
            print(
                f"step {step} loss {loss.item():.3f} rounds {updates.report().count} sent {updates.bytes_sent / 1e6:.1f} MB"
            )
    updates.finish()  # synchronizes the last, shorter round, so that all replicas are equal
    return model


if __name__ == "__main__":
    main()
    dist.destroy_process_group()
