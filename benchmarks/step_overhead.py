"""What does the trainer cost beside a bare loop, and what does a synchronisation add?

    python benchmarks/step_overhead.py                      # 2 replicas x 2 shards on the CPU
    python benchmarks/step_overhead.py --replicas 1 --shard 8   # one node of 8 GPUs

Four loops over the same model, data, FSDP2 sharding and AdamW take turns in one run, a few steps each: a bare loop
(below, thirty lines), the trainer's local step, and the trainer synchronising after *every* step, blocking and
layer-wise. Ratios are medians over the turns; the last column is what one synchronisation in 128 steps adds.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
MODEL = {"hidden_size": 256, "intermediate_size": 688, "num_hidden_layers": 4, "num_attention_heads": 4}
PERIOD = 128


def bare_loop(recipe, mesh, vocab_size: int, batches) -> Callable[[], None]:
    """One step of plain FSDP2 training, as one would write it by hand."""
    import torch
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    from llmtrain.model import blocks_of, build, initialise, model_config

    model = build(model_config(recipe.model, vocab_size), recipe.parallel.loss_chunk)
    dtype = {"bf16": torch.bfloat16, "fp32": torch.float32}[recipe.parallel.precision]
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
    for block in blocks_of(model):
        initialise(model, block, 0, mesh.device, torch.float32)
        fully_shard(
            block.modules if len(block.modules) > 1 else block.modules[0], mesh=mesh.devices["shard"], mp_policy=policy
        )
    fully_shard(model, mesh=mesh.devices["shard"], mp_policy=policy)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, betas=(0.9, 0.95), fused=True)

    def step() -> None:
        for batch in batches():
            batch = batch.to(mesh.device)
            loss = model(batch[:, :-1], batch[:, 1:]) / batch[:, 1:].numel()
            loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        norm.full_tensor()
        optimizer.step()
        optimizer.zero_grad()

    return step


def measure(replicas: int, shard: int, turns: int, steps: int) -> None:
    """Run all loops in turn on this rank; the main rank prints the table."""
    import torch
    from rich.console import Console as RichConsole
    from rich.table import Table

    from llmtrain.parallel.mesh import open_mesh
    from llmtrain.parallel.world import World
    from llmtrain.recipe import load_recipe
    from llmtrain.train.console import Console
    from llmtrain.train.run import build_trainer, prepare_for
    from llmtrain.train.rundir import RunDirectory
    from llmtrain.train.signals import StopRequest

    sync = {
        "trainer, local step": ["sync.period.every=1000000", "sync.schedule=blocking"],
        "trainer, blocking sync every step": ["sync.period.every=1", "sync.schedule=blocking"],
        "trainer, layer-wise sync every step": ["sync.period.every=1", "sync.schedule=layerwise"],
    }
    common = [
        *(f"model.config.{key}={value}" for key, value in MODEL.items()),
        f"parallel.replicas={replicas}",
        f"parallel.shard={shard}",
        f"train.global_batch={8 * replicas * shard}",
        "train.micro_batch=8",
        "train.sequence_length=128",
        "sync.warmup_steps=0",
    ]
    world = World.from_environment()
    recipes = {name: load_recipe(ROOT / "recipes/quickstart.yaml", common + extra) for name, extra in sync.items()}
    first = next(iter(recipes.values()))
    prepared = prepare_for(first, show_progress=world.rank == 0)
    with tempfile.TemporaryDirectory() as scratch, open_mesh(world, replicas, shard, "auto", 300) as mesh:

        def trainer(recipe):
            recipe = recipe.model_copy(update={"run": recipe.run.model_copy(update={"out_dir": scratch})})
            built = build_trainer(recipe, mesh, prepared, RunDirectory(recipe), None, Console(False), "", StopRequest())
            built.console.start(0, recipe.train.total_steps)
            return built

        trainers = {name: trainer(recipe) for name, recipe in recipes.items()}
        loader = next(iter(trainers.values())).loader
        loops = {"bare loop": bare_loop(first, mesh, prepared.vocab_size, loader.next)}
        loops |= {name: built.train_step for name, built in trainers.items()}
        times: dict[str, list[float]] = {name: [] for name in loops}
        for turn in range(turns + 1):  # the first warms up
            for name, loop in loops.items():
                mesh.everyone.all_reduce(torch.zeros(1)).wait()
                if mesh.device.type == "cuda":
                    torch.cuda.synchronize()
                started = time.perf_counter()
                for _ in range(steps):
                    loop()
                if mesh.device.type == "cuda":
                    torch.cuda.synchronize()
                if turn:
                    times[name].append((time.perf_counter() - started) / steps)
        if not mesh.is_main:
            return
        local = statistics.median(times["trainer, local step"])
        table = Table(
            title=f"{replicas} replicas x {shard} shards on {mesh.device.type}, torch {torch.__version__}, {turns} turns of {steps} steps"
        )
        for column in (
            "loop",
            "ms/step, median",
            "ratio to bare",
            "its quartiles",
            f"added by one sync in {PERIOD} steps",
        ):
            table.add_column(column, justify="right" if column != "loop" else "left")
        for name, series in times.items():
            ratios = [a / b for a, b in zip(series, times["bare loop"], strict=True)]
            low, middle, high = statistics.quantiles(ratios, n=4)
            added = f"{100 * (statistics.median(series) - local) / PERIOD / local:+.2f} %" if "sync" in name else ""
            table.add_row(
                name, f"{1000 * statistics.median(series):.1f}", f"{middle:.3f}", f"{low:.3f} to {high:.3f}", added
            )
        RichConsole(width=140).print(table)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--replicas", type=int, default=2)
    parser.add_argument("--shard", type=int, default=2)
    parser.add_argument("--turns", type=int, default=15)
    parser.add_argument("--steps", type=int, default=8, help="steps a turn")
    parser.add_argument("--rank", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank:
        measure(options.replicas, options.shard, options.turns, options.steps)
    else:
        count = str(options.replicas * options.shard)
        command = [
            sys.executable,
            "-m",
            "torch.distributed.run",
            "--standalone",
            "--nproc-per-node",
            count,
            __file__,
            "--rank",
        ]
        sys.exit(
            subprocess.run([*command, *sys.argv[1:]], cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)}).returncode
        )
