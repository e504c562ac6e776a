"""Measurement of one loop of benchmarks/peers.py, in the processes on the hosts, which run this file."""

from __future__ import annotations

import gc
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from hosts import TIMEOUT, Member, serves
from loops import NEVER, RECIPE, build
from step_overhead import changes_for
from table import ROOT

if TYPE_CHECKING:
    import torch
    import torch.distributed as dist

    from llmtrain.config import Recipe
    from llmtrain.data.dataset import TokenDataset
    from llmtrain.parallel.mesh import Mesh

SIZE, MICRO_BATCH, SEQUENCE = "2.5M", 8, 128
FRAGMENTS = 4
OURS = {
    "never": ("llmtrain, never", ["sync.method=local_sgd", NEVER]),
    "synchronous": ("llmtrain synchronous", ["sync.method=synchronous", "sync.period=every_step"]),
    "diloco": ("llmtrain DiLoCo", ["sync.method=diloco"]),
    "edit": ("llmtrain EDiT", ["sync.method=edit"]),
    "streaming_fp32": ("llmtrain Streaming DiLoCo", ["sync.method=streaming_diloco", "sync.wire.kind=fp32"]),
    "streaming_int4": ("llmtrain Streaming DiLoCo, int4", ["sync.method=streaming_diloco"]),
    "co2": ("llmtrain CO2", ["sync.method=co2"]),
}
"""Name in the table and overrides of each llmtrain loop."""
COUNTERPARTS = {"torchft_diloco": "diloco", "torchft_streaming": "streaming_fp32"}
"""Loop of llmtrain with the same outer optimizer, by the peer's loop."""


def delay_of(every: int) -> int:
    """Return the local steps between sending a fragment and applying its mean: the most that torchft allows, but at most 5."""
    return min(5, every // FRAGMENTS - 1)


def recipe_of(task: Mapping[str, Any], loop: str | None = None) -> Recipe:
    """Return the recipe of a task's loop, or of `loop` under the same task. A peer's loop ignores its own recipe's `sync` section."""
    from llmtrain.recipe_loader import load_recipe

    every, steps = task["every"], task["every"] * (1 + task["rounds"])
    loop = loop or task["loop"]
    schedule = [] if task["step_ms"] is None else ["schedule.kind=constant"]
    common = [
        *changes_for("llama", SIZE, SEQUENCE),
        f"train.steps={steps}",
        f"train.sequence_length={SEQUENCE}",
        f"train.micro_batch={MICRO_BATCH}",
        f"train.global_batch={MICRO_BATCH * task['replicas']}",
        f"schedule.warmup_steps={min(20, steps // 2)}",
        *schedule,
        f"parallel.replicas={task['replicas']}",
        "parallel.shards=1",
        "parallel.precision=fp32",
        "log.tensorboard=false",
        "eval.sample_prompt=null",
        "sync.warmup_steps=0",
        f"sync.period.every={every}",
        *task["common"],
    ]
    own = task["overrides"] if loop == task["loop"] else None
    if own is None:
        own = OURS[loop][1] if loop in OURS else OURS["diloco"][1]
    recipe = load_recipe(ROOT / RECIPE, [*common, *own])
    if recipe.sync.schedule.kind == "overlapped" and not any("sync.schedule" in key for key in own):
        fragments = [f"sync.schedule.steps={delay_of(every)}", f"sync.schedule.fragments={FRAGMENTS}"]
        recipe = load_recipe(ROOT / RECIPE, [*common, *own, *fragments])
    return recipe


class TrainerLoop:
    """Steps of llmtrain's own trainer on this replica."""

    def __init__(self, recipe: Recipe, mesh: Mesh, prepared: TokenDataset, scratch: str):
        self._trainer = build(recipe, mesh, prepared, scratch)
        self.model = self._trainer.engine.model

    def step(self, number: int) -> None:
        """Take the next step, which is step `number`."""
        self._trainer.train_step()

    def finish(self) -> None:
        """Complete the messages in flight, for which other replicas may wait."""
        self._trainer.method.finish()

    def close(self) -> None:
        """Stop background work."""
        self._trainer.method.close()


class PeerLoop:
    """Steps of a loop of benchmarks/peer_loops.py on this replica, with the same model and batches as llmtrain's loops."""

    def __init__(self, task: Mapping[str, Any], recipe: Recipe, prepared: TokenDataset, member: Member):
        import torch
        from peer_loops import LOOPS, Job

        from llmtrain.data.batch_shape import BatchShape
        from llmtrain.data.build_loader import build_loader
        from llmtrain.data.loader import PrefetchLoader
        from llmtrain.lr import LRSchedule
        from llmtrain.model import blocks_of, initialize, model_config
        from llmtrain.model import build as build_model
        from llmtrain.parallel.optimizers import build_optimizer, decay_groups

        self.model = build_model(model_config(recipe.model, prepared.vocab_size), recipe.parallel.loss_chunk)
        blocks = blocks_of(self.model)
        for block in blocks:
            initialize(self.model, block, recipe.run.seed, torch.device("cpu"), torch.float32)
        shape = BatchShape.of(recipe, replica=member.rank, replicas=member.size)
        loader = build_loader(recipe, prepared, shape, write=False)
        optim, outer = recipe.optim, recipe_of(task, COUNTERPARTS.get(task["loop"], "diloco")).sync.outer
        job = Job(
            model=self.model,
            batches=PrefetchLoader(loader, TIMEOUT.total_seconds(), pin=False).next,
            optimizer=lambda parameters: build_optimizer(decay_groups(parameters, optim.weight_decay), optim),
            lr=LRSchedule.of(recipe).at,
            clip_norm=optim.clip_norm,
            every=task["every"],
            member=member,
            fragments=[
                torch.nn.ModuleList(module for block in blocks[first::FRAGMENTS] for module in block.modules)
                for first in range(FRAGMENTS)
            ],
            outer_lr=outer.lr,
            outer_momentum=outer.momentum,
            delay=delay_of(task["every"]),
            alpha=recipe_of(task, "streaming_fp32").sync.schedule.alpha,
        )
        self._loop = LOOPS[task["loop"]](job)
        self.step, self.close = self._loop.step, self._loop.close

    def finish(self) -> None:
        """Do nothing, because nothing is in flight at the end of a round."""


@contextmanager
def process_group(member: Member) -> Iterator[dist.Store]:
    """Open torch's default process group of all ranks, and close it once no rank needs it."""
    import torch.distributed as dist

    store = dist.PrefixStore("group", member.store)
    dist.init_process_group("gloo", store=store, rank=member.rank, world_size=member.size, timeout=TIMEOUT)
    try:
        yield store
        member.barrier("closing the process group")
    finally:
        dist.destroy_process_group()


def measure(task: dict[str, Any], member: Member) -> dict[str, Any]:
    """Return one loop's time, tokens, bytes and loss on this host."""
    from llmtrain.train.devices import keep_freed_memory
    from llmtrain.train.prepare_data import prepare_texts

    keep_freed_memory()  # as the trainer does
    recipe = recipe_of(task)
    prepared = prepare_texts(recipe, show_progress=False)[""]
    try:
        if task["loop"] in COUNTERPARTS:  # torchft makes its own groups
            loop = PeerLoop(task, recipe, prepared, member)
            found = timed_steps(loop, task, member)
            loop.close()
            if task["step_ms"] is None:
                with process_group(member):
                    found["loss"] = validation_loss(loop.model, recipe, prepared, member)
            return found
        with process_group(member) as store, tempfile.TemporaryDirectory() as scratch:
            if task["overrides"] is None:
                loop = PeerLoop(task, recipe, prepared, member)
            else:
                loop = TrainerLoop(recipe, mesh_of(member, store), prepared, scratch)
            found = timed_steps(loop, task, member)
            if task["step_ms"] is None:
                found["loss"] = validation_loss(loop.model, recipe, prepared, member)
            loop.finish()
            member.barrier("closing the loop")
            loop.close()
            return found
    finally:
        gc.collect()  # deletes process groups, whose threads wake up again and again


def mesh_of(member: Member, store: dist.Store) -> Mesh:
    """Return the mesh of one replica per host, over the process group that is open."""
    import torch

    from llmtrain.parallel.mesh import build_mesh
    from llmtrain.parallel.world import World

    world = World(member.rank, member.size, local_rank=0, local_size=1)
    return build_mesh(
        world, torch.device("cpu"), replicas=member.size, shards=1, replica_backend="gloo", timeout=TIMEOUT, store=store
    )


def timed_steps(loop: TrainerLoop | PeerLoop, task: Mapping[str, Any], member: Member) -> dict[str, Any]:
    """Take all steps of a task, and return the seconds and tokens of the rounds after the first one, and their bytes per round."""
    from emulated_model import emulate

    if task["step_ms"] is not None:
        emulate(loop.model, task["step_ms"] / 1000, seed=member.rank)
    every, marks = task["every"], []
    member.barrier("starting")
    for number in range(1, every * (1 + task["rounds"]) + 1):
        loop.step(number)
        if number == every:
            member.barrier("ending the first round")  # replicas that share cores may have begun at different times
        if number % every == 0:
            marks.append((time.perf_counter(), member.sent()))
    (first, sent_first), (last, sent_last) = marks[0], marks[-1]
    member.barrier("ending")
    return {
        "seconds": last - first,
        "tokens": MICRO_BATCH * SEQUENCE * every * task["rounds"],
        "bytes": None if sent_last is None else (sent_last - sent_first) / task["rounds"],
        "parameters": sum(parameter.numel() for parameter in loop.model.parameters()),
        "loss": None,
    }


def validation_loss(model: torch.nn.Module, recipe: Recipe, prepared: TokenDataset, member: Member) -> float:
    """Set the model to the replicas' mean, and return its loss per token. A collective of all ranks."""
    import torch
    import torch.distributed as dist

    from llmtrain.data.build_loader import validation_batches

    totals = torch.zeros(2, dtype=torch.float64)
    with torch.no_grad():
        for parameter in model.parameters():
            mean = parameter / member.size
            dist.all_reduce(mean)
            parameter.copy_(mean)
        for inputs, labels in validation_batches(recipe, prepared, rank=member.rank, world=member.size)():
            totals += torch.tensor([model(inputs, labels).item(), labels.numel()], dtype=torch.float64)
    dist.all_reduce(totals)
    return (totals[0] / totals[1]).item()


if __name__ == "__main__":
    serves(measure)
