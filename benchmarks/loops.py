"""Shared parts of the speed benchmarks: processes on this machine, loops that take turns, and plain loops for comparison."""

from __future__ import annotations

import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, TypeVar

from table import ROOT

if TYPE_CHECKING:
    import torch

    from llmtrain.config import Recipe
    from llmtrain.data.dataset import TokenDataset
    from llmtrain.parallel.mesh import Mesh
    from llmtrain.train.trainer import Trainer

T = TypeVar("T")
RECIPE = "recipes/edit_llama_stdlib.yaml"
MODEL = {"hidden_size": 256, "intermediate_size": 688, "num_hidden_layers": 4, "num_attention_heads": 4}
"""Configuration of a small model, which has 4.2 M parameters with the recipe's vocabulary."""
ENDLESS = ("train.steps=1_000_000", "sync.warmup_steps=0", "optim.lr=1.0e-4")
"""Overrides for a run whose end no benchmark reaches. Training is stable even if every step synchronizes."""
NEVER = "sync.period.every=1_000_000_000"
"""Override for a run with only local steps."""
TASK, ANSWER = "BENCHMARK_TASK", "BENCHMARK_ANSWER"
PATIENCE_SECONDS = 3600
"""Maximum seconds for all measurements of one set of processes."""


def on_gpu() -> bool:
    """Return whether this machine has a GPU."""
    import torch

    return torch.cuda.is_available()


# ---- processes


class RowFailed(SystemExit):
    """Failure of a measurement, with the reason. It ends a script that does not catch it."""

    def __init__(self, what: str, reason: str):
        super().__init__(f"{what} {reason}")
        self.reason = reason


def ask(
    script: str,
    ranks: int,
    task: Mapping[str, Any],
    environment: Mapping[str, str] | None = None,
    patience: float = PATIENCE_SECONDS,
    output: IO[str] | None = None,
) -> Any:
    """Start `ranks` processes of a benchmark script, give each the task (JSON), and return the main process's answer. The
    processes share this machine's cores. Their output goes to `output`. Raises RowFailed if one fails, or after `patience`
    seconds."""
    command = [sys.executable, script]
    if ranks > 1:
        launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
        command = [sys.executable, *launcher, script]
    threads = str(max(1, (os.cpu_count() or 1) // ranks))
    measuring = f"{Path(script).name}: measuring {dict(task)}"
    with tempfile.TemporaryDirectory() as folder:
        answer = Path(folder) / "answer.json"
        path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
        ours = {"PYTHONPATH": path, TASK: json.dumps(dict(task)), ANSWER: str(answer)}
        variables = {"OMP_NUM_THREADS": threads, **os.environ, **ours, **(environment or {})}
        process = subprocess.Popen(
            command, cwd=ROOT, env=variables, stdout=output, stderr=subprocess.STDOUT if output else None
        )
        try:
            code = process.wait(patience)
        except subprocess.TimeoutExpired:
            raise RowFailed(measuring, f"took longer than {patience:.0f} s") from None
        finally:
            end_with_children(process)
        if code or not answer.exists():
            raise RowFailed(measuring, f"failed with exit code {code}; see its output")
        return json.loads(answer.read_text())


def end_with_children(process: subprocess.Popen) -> None:
    """Kill a process and all of its descendants, unless it has ended."""
    if process.poll() is not None:
        return
    import psutil

    with contextlib.suppress(psutil.NoSuchProcess):
        started = psutil.Process(process.pid).children(recursive=True)
        process.kill()  # first, so that it cannot restart its children
        for child in started:
            with contextlib.suppress(psutil.NoSuchProcess):
                child.kill()
    process.wait()


def is_asked(measure: Callable[[dict[str, Any]], Any]) -> bool:
    """Measure, write the main process's answer, and return True, in a process that `ask` started. Return False in any other
    process."""
    if TASK not in os.environ:
        return False
    answer = measure(json.loads(os.environ[TASK]))
    if answer is not None:
        Path(os.environ[ANSWER]).write_text(json.dumps(answer))
    return True


# ---- loops


@contextmanager
def opened(recipe: Recipe, replicas: int, shard: int) -> Iterator[tuple[Mesh, TokenDataset, str]]:
    """Yield (mesh of the processes that `ask` started, the recipe's tokens, folder for runs). The folder is deleted on exit."""
    from llmtrain.parallel.mesh import open_process_mesh
    from llmtrain.parallel.world import World
    from llmtrain.train.prepare_data import prepare_texts

    world = World.from_environment()
    prepared = prepare_texts(recipe, show_progress=world.rank == 0)[""]
    mesh_of = open_process_mesh(world, replicas=replicas, shards=shard, replica_backend="auto", timeout_seconds=300)
    with tempfile.TemporaryDirectory() as scratch, mesh_of as mesh:
        yield mesh, prepared, scratch


def build(recipe: Recipe, mesh: Mesh, prepared: TokenDataset, scratch: str, name: str = "") -> Trainer:
    """Return a trainer whose `train_step` can be called. Several trainers on one mesh need different names."""
    import torch.distributed as dist

    from llmtrain.train.background_eval import BackgroundEval
    from llmtrain.train.build_trainer import OpenRun, build_trainer
    from llmtrain.train.loggers import Console
    from llmtrain.train.mirror import Mirror
    from llmtrain.train.run_dir import RunDirectory
    from llmtrain.train.signals import StopRequest

    recipe = recipe.model_copy(update={"run": recipe.run.model_copy(update={"out_dir": scratch})})
    if mesh.store is not None:
        mesh = replace(mesh, store=dist.PrefixStore(f"benchmark {name}", mesh.store))
    directory, console, stop = RunDirectory(recipe), Console(False), StopRequest()
    run = OpenRun(
        recipe=recipe,
        directory=directory,
        console=console,
        mirror=Mirror(recipe, directory, console.print, mesh.is_main),
        texts={"": prepared},
        train_text=None,
        mesh=mesh,
        mesh_reason="",
        stop=stop,
        background_eval=BackgroundEval(None, recipe, directory, console, stop),
        at_end=contextlib.ExitStack(),
    )
    built = build_trainer(run, None)
    built.metrics.run_log.console.start(0, recipe.train.total_steps, None)
    return built


def plain_loop(
    recipe: Recipe, mesh: Mesh, vocab_size: int, batches: Callable[[], Sequence[torch.Tensor]]
) -> Callable[[], None]:
    """Return a function that takes one training step without sharding, written by hand in the usual way: transformers' model
    and loss, autocast for bf16, AdamW."""
    import torch
    from transformers import AutoModelForCausalLM

    from llmtrain.model import model_config

    model = AutoModelForCausalLM.from_config(model_config(recipe.model, vocab_size)).to(mesh.device)
    if recipe.parallel.compile:
        model.compile()
    in_bf16 = recipe.parallel.precision == "bf16"

    def mean_loss(batch: torch.Tensor) -> torch.Tensor:
        labels = batch[:, 1:].contiguous()
        with torch.autocast(mesh.device.type, torch.bfloat16, enabled=in_bf16):
            return model(batch[:, :-1], labels=labels, shift_labels=labels, use_cache=False).loss

    return plain_step(model, mean_loss, batches, mesh.device)


def bare_loop(
    recipe: Recipe,
    mesh: Mesh,
    vocab_size: int,
    batches: Callable[[], Sequence[torch.Tensor]],
    in_float8: bool = False,
    resharded: bool = True,
) -> Callable[[], None]:
    """Return a function that takes one step of plain FSDP2 training, written by hand in the usual way. With `in_float8`, the
    matrix products of layers are in float8, scaled by rows (torchao). Without `resharded`, parameters stay gathered between
    forward and backward."""
    import torch
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    from llmtrain import model as models
    from llmtrain.parallel.wrapping import wrap_layers

    model = models.build(models.model_config(recipe.model, vocab_size), recipe.parallel.loss_chunk)
    dtype = {"bf16": torch.bfloat16, "fp32": torch.float32}[recipe.parallel.precision]
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
    if in_float8:
        from torchao.float8 import Float8LinearConfig, convert_to_float8_training

        convert_to_float8_training(
            model,
            config=Float8LinearConfig.from_recipe_name("rowwise"),
            module_filter_fn=lambda module, name: "layers" in name,
        )
    blocks = models.blocks_of(model)
    wrap_layers(blocks, recipe.parallel)
    kept = {} if resharded else {"reshard_after_forward": False}
    for block in blocks:
        models.initialize(model, block, 0, mesh.device, torch.float32)
        unit = block.modules if len(block.modules) > 1 else block.modules[0]
        fully_shard(unit, mesh=mesh.shard_mesh["shard"], mp_policy=policy, **kept)
    fully_shard(model, mesh=mesh.shard_mesh["shard"], mp_policy=policy)

    def mean_loss(batch: torch.Tensor) -> torch.Tensor:
        return model(batch[:, :-1], batch[:, 1:]) / batch[:, 1:].numel()

    return plain_step(model, mean_loss, batches, mesh.device)


def deepspeed_loop(
    recipe: Recipe, mesh: Mesh, vocab_size: int, batches: Callable[[], Sequence[torch.Tensor]]
) -> Callable[[], None]:
    """Return a function that takes one step of plain DeepSpeed training, as in DeepSpeed's guide: transformers' model and loss,
    AdamW, and ZeRO at the recipe's stage with DeepSpeed's default settings."""
    import deepspeed
    import torch
    from transformers import AutoModelForCausalLM

    from llmtrain.model import model_config

    model = AutoModelForCausalLM.from_config(model_config(recipe.model, vocab_size))
    config = {
        "train_micro_batch_size_per_gpu": recipe.train.micro_batch,
        "gradient_clipping": 1.0,
        "bf16": {"enabled": recipe.parallel.precision == "bf16"},
        "zero_optimization": {"stage": recipe.parallel.zero_stage},
        "zero_allow_untested_optimizer": True,
    }
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, betas=(0.9, 0.95), fused=True)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config, dist_init_required=False)

    def step() -> None:
        for batch in batches():
            batch = batch.to(mesh.device, non_blocking=True)
            labels = batch[:, 1:].contiguous()
            engine.backward(engine(batch[:, :-1], labels=labels, shift_labels=labels, use_cache=False).loss)
            engine.step()

    return step


def plain_step(
    model: torch.nn.Module,
    mean_loss: Callable[[torch.Tensor], torch.Tensor],
    batches: Callable[[], Sequence[torch.Tensor]],
    device: torch.device,
) -> Callable[[], None]:
    """Return a function that takes one step of a model: backward of each batch's mean loss, clipping, AdamW."""
    import torch
    from torch.distributed.tensor import DTensor

    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, betas=(0.9, 0.95), fused=True)

    def step() -> None:
        for batch in batches():
            mean_loss(batch.to(device, non_blocking=True)).backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        if isinstance(norm, DTensor):
            norm.full_tensor()
        optimizer.step()
        optimizer.zero_grad()

    return step


def take_turns(measurements: Mapping[str, Callable[[], T]], turns: int) -> dict[str, list[T]]:
    """Return the results of each measurement by turn. Each turn makes all measurements once, so that changes of the machine's
    speed affect all alike. Every other turn has the reverse order, because a measurement may depend on the one before it. A
    first turn warms up and does not count."""
    found: dict[str, list[T]] = {name: [] for name in measurements}
    forwards = list(measurements)
    for turn in range(turns + 1):
        for name in forwards[:: 1 if turn % 2 else -1]:
            measured = measurements[name]()
            if turn:
                found[name].append(measured)
    return found


def timed(step: Callable[[], object], steps: int, mesh: Mesh) -> float:
    """Take `steps` steps, which all ranks begin together, and return their seconds."""
    import torch

    mesh.all_ranks.all_reduce(torch.zeros(1))
    if mesh.device.type == "cuda":
        torch.cuda.synchronize()
    started = time.perf_counter()
    for _ in range(steps):
        step()
    if mesh.device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - started


class Pace:
    """Clock of emulated computation. Each span ends at a time that is fixed in advance. If a sleep or other work takes longer,
    the next span is shorter by the excess, so that the sum of all spans is exact. Time between spans does not count."""

    def __init__(self, now: Callable[[], float] = time.perf_counter, sleep: Callable[[float], None] = time.sleep):
        self._now, self._sleep = now, sleep
        self.debt = 0.0
        """Seconds by which the last span was too long."""
        self._end = 0.0

    def resume(self) -> None:
        """Begin a span, which lasts until `pause`."""
        self._end = self._now() - self.debt

    def run(self, seconds: float) -> None:
        """Emulate `seconds` of computation."""
        self._end += seconds
        self._sleep(max(0.0, self._end - self._now()))

    def pause(self) -> None:
        """End the span."""
        self.debt = self._now() - self._end

    def sleep(self, seconds: float) -> None:
        """Emulate a span of `seconds`."""
        self.resume()
        self.run(seconds)
        self.pause()


# ---- numbers


def quartiles(values: Sequence[float]) -> tuple[float, float, float]:
    """Return (lower quartile, median, upper quartile)."""
    return tuple(statistics.quantiles(values, n=4)) if len(values) > 1 else (values[0],) * 3
