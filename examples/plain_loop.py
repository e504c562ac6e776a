"""DiLoCo in a plain PyTorch loop: every process is a replica. The loop saves checkpoints, and continues from them.

The model learns to predict the next byte of this file. Run it with

    torchrun --nproc-per-node 2 examples/plain_loop.py [FOLDER]

In FOLDER, every rank keeps its last two checkpoints; without FOLDER, nothing is saved. With GPUs, each process takes one;
CUDA_VISIBLE_DEVICES= hides the GPUs. Between hosts, set GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME to the network interface.
"""

import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from llmtrain.sync import LocalUpdates


def save(folder: Path, step: int, parts: dict[str, Any]) -> None:
    """Write this rank's checkpoint of a step. Keep the previous one, in case some ranks do not complete this one."""
    folder.mkdir(parents=True, exist_ok=True)
    unfinished = folder / f"rank{dist.get_rank()}.tmp"
    torch.save({name: part.state_dict() for name, part in parts.items()}, unfinished)
    dist.barrier()  # all ranks have written this step, so all have the previous checkpoint
    unfinished.rename(checkpoint(folder, step))
    for old in steps_in(folder)[:-2]:
        checkpoint(folder, old).unlink()


def load(folder: Path, parts: dict[str, Any], device: torch.device) -> int:
    """Load this rank's checkpoint of the newest step that all ranks have, and return the step, or 0 if there is none."""
    of_ranks: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(of_ranks, steps_in(folder))
    step = max(set.intersection(*map(set, of_ranks)), default=0)
    if not step and max(map(len, of_ranks)) > 1:  # more than a first save that was interrupted
        raise SystemExit(f"{folder}: no step of which all ranks have a checkpoint; were there other processes before?")
    if step:
        state = torch.load(checkpoint(folder, step), map_location=device, weights_only=True)
        for name, part in parts.items():
            part.load_state_dict(state[name])
    for newer in (found for found in steps_in(folder) if found > step):
        checkpoint(folder, newer).unlink()  # other ranks lack it
    return step


def checkpoint(folder: Path, step: int) -> Path:
    """Return the path of this rank's checkpoint of a step."""
    return folder / f"rank{dist.get_rank()}-step{step}.pt"


def steps_in(folder: Path) -> list[int]:
    """Return the steps of this rank's checkpoints, in ascending order."""
    return sorted(int(path.stem.partition("-step")[2]) for path in folder.glob(f"rank{dist.get_rank()}-step*.pt"))


def main(steps: int = 60, folder: Path | None = None, save_every: int = 10) -> nn.Module:
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
    parts = {"model": model, "optimizer": optimizer, "updates": updates}
    done = load(folder, parts, device) if folder else 0

    text = torch.tensor(list(Path(__file__).read_bytes()), device=device)
    for step in range(done + 1, steps + 1):
        # Every replica trains on different samples, and a resumed loop draws the same ones again.
        drawn = torch.Generator().manual_seed(step * dist.get_world_size() + dist.get_rank())
        starts = torch.randint(len(text) - 8, (32, 1), generator=drawn).to(device) + torch.arange(8, device=device)
        loss = nn.functional.cross_entropy(model(text[starts]), text[starts[:, -1] + 1])
        loss.backward()
        optimizer.step()  # the hooks of LocalUpdates average gradients before it, or synchronize after it
        optimizer.zero_grad()
        if step % 20 == 0 and dist.get_rank() == 0:
            print(
                f"step {step} loss {loss.item():.3f} rounds {updates.report().count} sent {updates.bytes_sent / 1e6:.1f} MB"
            )
        if folder and step % save_every == 0:
            save(folder, step, parts)
    updates.finish()  # synchronizes the last, shorter round, so that all replicas are equal
    return model


if __name__ == "__main__":
    main(folder=Path(sys.argv[1]) if sys.argv[1:] else None)
    dist.destroy_process_group()
