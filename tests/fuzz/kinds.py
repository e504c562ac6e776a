"""Kinds of wrong input. Each is a function that prepares a folder once and returns a function that tries one case.

A case draws its input from a seeded generator, runs what a user would run on it, and returns the exit code. It raises
Finding if this ends badly.
"""

from __future__ import annotations

import json
import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import yaml

from llmtrain.recipe_loader import load_recipe, resolved_yaml
from tests.fuzz.draws import ODD, Finding, damage, ends_well, mutate, spoil

ROOT = Path(__file__).resolve().parents[2]
QUICKSTART = ROOT / "recipes/edit_llama_stdlib.yaml"
VARIABLES = (
    "NNODES", "NODE_RANK", "MASTER_ADDR", "MASTER_PORT", "NPROC_PER_NODE", "RANK", "WORLD_SIZE", "LOCAL_RANK",
    "LOCAL_WORLD_SIZE", "GROUP_RANK", "OMP_NUM_THREADS", "GLOO_SOCKET_IFNAME", "LLMTRAIN_SHARE_GPU", "LLMTRAIN_STARTED",
    "SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID", "SLURM_NTASKS_PER_NODE", "SLURM_STEP_TASKS_PER_NODE",
    "SLURM_STEP_NUM_TASKS", "SLURM_STEP_NUM_NODES", "SLURM_JOB_NUM_NODES", "SLURM_JOB_NODELIST", "SLURM_JOB_ID", "SLURM_NODEID",
    "SLURM_STEP_NODELIST", "SLURM_STEP_ID", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "PET_NNODES",
)  # fmt: skip
WORDS = (
    "train", "launch", "recipe", "check", "show", "keys", "schema", "prepare", "runs", "export", "generate", "eval", "compare",
    "doctor", "--help", "--version", "--json", "--step", "--tokens", "--weights", "--out", "--suite", "--limit",
    "--processes", "--timeout", "--gpu", "--mbit", "--latency-ms", "--tflops", "--report", "--baseline", "--retry", "--no-shaping",
    "--temperature", "--top-k", "--over-time", "--device", "--data-dir", "--dtype", "--max-shard-size", "1", "-1", "0", "1e99",
    "nan", "x", "", "--", "=", "a=b", "optim", "optim.lr=1", "recipes/nowhere.yaml", "runs/none", "/dev/null", "/", "\u2028",
)  # fmt: skip
SHORT_KEYS = ("data.tokenizer=train:300", "data.validation_fraction=0.2", "eval.tokens=200", "train.sequence_length=32")
Case = Callable[[random.Random], int]


def write_text(folder: Path) -> Path:
    """Write a text of 400 short documents."""
    path = folder / "text.txt"
    path.write_text("<|endoftext|>".join(f"a few words {i} and others" for i in range(400)))
    return path


def resolved(folder: Path) -> dict[str, Any]:
    """Return a small, resolved recipe with its own text."""
    keys = [f"data.source={write_text(folder)}", f"data.cache_dir={folder / 'data'}", f"run.out_dir={folder / 'runs'}"]
    return yaml.safe_load(resolved_yaml(load_recipe(QUICKSTART, [*keys, *SHORT_KEYS])))


def recipes(folder: Path) -> Case:
    """Change a recipe's values, and sometimes its bytes."""
    recipe, path = resolved(folder), folder / "recipe.yaml"

    def case(draw: random.Random) -> int:
        changed = recipe
        for _ in range(draw.choice([1, 1, 1, 2, 3])):
            changed = mutate(changed, draw)
        path.write_text(yaml.safe_dump(changed, allow_unicode=True))
        if draw.random() < 0.2:
            damage(path, draw)
        command = draw.choice(["check"] * 4 + ["show"])
        return ends_well(["recipe", command, str(path)], f"{command} {path.read_bytes()[:4000]!r}")

    return case


def overrides(folder: Path) -> Case:
    """Override keys of the quickstart with odd values on the command line."""
    keys = list(_leaves(yaml.safe_load(resolved_yaml(load_recipe(QUICKSTART, [])))))

    def case(draw: random.Random) -> int:
        count = draw.choice([1, 2])
        given = [f"{draw.choice(keys)}{draw.choice(['=', '=', '==', ''])}{draw.choice(ODD)}" for _ in range(count)]
        given.append(f"data.cache_dir={folder / 'data'}")
        return ends_well(["recipe", "check", str(QUICKSTART), *given], f"overrides {given}")

    return case


def _leaves(value: dict, path: str = "") -> Any:
    for key, inner in value.items():
        yield f"{path}{key}"
        if isinstance(inner, dict):
            yield from _leaves(inner, f"{path}{key}.")


def variables(folder: Path) -> Case:
    """Set launchers' environment variables to odd values."""
    from llmtrain.errors import is_local_rank_zero
    from llmtrain.eval.evaluated_checkpoint import check_model_path
    from llmtrain.launch.nodes import Nodes, check_thread_count, processes_per_node
    from llmtrain.parallel.world import World, master_endpoint, may_share_gpu, node_name
    from llmtrain.startup import seconds_since_command

    parallel = load_recipe(QUICKSTART, []).parallel
    (folder / "recipe.yaml").touch()
    (folder / "checkpoints/step-00000001").mkdir(parents=True)
    (folder / "checkpoints/step-00000001/state.json").touch()
    readers: list[Callable[[], object]] = [
        *(
            Nodes.from_environment,
            check_thread_count,
            World.from_environment,
            master_endpoint,
            may_share_gpu,
            node_name,
        ),
        *(seconds_since_command, lambda: processes_per_node(parallel, 1), lambda: check_model_path(folder, 1)),
    ]

    def case(draw: random.Random) -> int:
        given = {name: str(draw.choice([0, 1, 2, *ODD])) for name in draw.sample(VARIABLES, draw.randrange(1, 6))}
        with patch.dict(os.environ, given):
            for name in VARIABLES:
                if name not in given:
                    os.environ.pop(name, None)
            if not is_local_rank_zero():
                os.environ["LOCAL_RANK"] = os.environ["SLURM_LOCALID"] = ""  # other local ranks print no errors
            return max(ends_well(read, f"variables {given}") for read in readers)

    return case


def command_lines(folder: Path) -> Case:
    """Combine words of the command line at random."""

    def case(draw: random.Random) -> int:
        words = [draw.choice(WORDS) for _ in range(draw.randrange(1, 5))]
        words = [word for word in words if word not in ("train", "launch", "doctor", "compare")] or ["runs"]
        return ends_well(words, f"words {words}")

    return case


def run_files(folder: Path) -> Case:
    """Damage a run's recipe, metrics or summary."""
    recipe, run = resolved(folder), folder / "runs" / "a"
    other = folder / "runs" / "b"
    lines = '{"step": 1, "train/loss": 5.0, "tokens": 9}\n{"step": 2, "eval/loss": 4.0, "tokens": 9}\n'

    def write(run: Path) -> None:
        shutil.rmtree(run, ignore_errors=True)
        run.mkdir(parents=True)
        (run / "recipe.yaml").write_text(yaml.safe_dump(recipe))
        (run / "metrics.jsonl").write_text(lines)
        (run / "summary.json").write_text(json.dumps({"stopped": "done", "steps": 2, "final_eval_loss": 4.0}))

    def case(draw: random.Random) -> int:
        write(run)
        write(other)
        what = [spoil(run, draw) for _ in range(draw.choice([1, 1, 2]))]
        runs = str(run.parent)
        command = draw.choice(
            [
                *(
                    ["runs", runs],
                    ["runs", runs],
                    ["runs", runs, "--json"],
                    ["export", str(run)],
                    ["generate", str(run)],
                ),
                ["compare", "--report", str(run), str(other)],
            ]
        )
        content = [path.read_bytes() for path in sorted(run.iterdir()) if path.is_file()]
        return ends_well(command, f"{command} {what} {content}"[:6000])

    return case


def token_files(folder: Path) -> Case:
    """Damage prepared tokens. `prepare` should name the damaged file, or create it again."""
    command = ["prepare", str(QUICKSTART), f"data.source={write_text(folder)}", *SHORT_KEYS, "train.steps=60"]
    clean, cache = folder / "clean", folder / "cache"
    if ends_well([*command, f"data.cache_dir={clean}"], "unchanged"):
        raise Finding("a right recipe is refused")

    def case(draw: random.Random) -> int:
        shutil.rmtree(cache, ignore_errors=True)
        shutil.copytree(clean, cache)
        what = spoil(cache, draw)
        return ends_well([*command, f"data.cache_dir={cache}"], what)

    return case


def texts(folder: Path) -> Case:
    """Prepare damaged texts: plain text, JSON lines, gzip and Parquet."""
    import gzip

    import pyarrow
    import pyarrow.parquet

    clean, source = folder / "clean", folder / "source"
    clean.mkdir()
    rows = [{"text": f"a few words {i} and others"} for i in range(400)]
    lines = "\n".join(map(json.dumps, rows))
    write_text(clean)
    (clean / "a.jsonl").write_text(lines)
    (clean / "b.jsonl.gz").write_bytes(gzip.compress(lines.encode()))
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), clean / "c.parquet")

    def case(draw: random.Random) -> int:
        shutil.rmtree(source, ignore_errors=True)
        shutil.rmtree(folder / "data", ignore_errors=True)
        if draw.random() < 0.5:
            shutil.copytree(clean, source)
        else:
            source.mkdir()
            shutil.copy(draw.choice(sorted(clean.iterdir())), source)
        what = spoil(source, draw)
        given = draw.choice([source, next(source.iterdir(), source)])
        command = ["prepare", str(QUICKSTART), f"data.source={given}", *SHORT_KEYS, f"data.cache_dir={folder / 'data'}"]
        return ends_well([*command, "train.steps=60"], f"{given.name}: {what}")

    return case


def tokenizers(folder: Path) -> Case:
    """Damage a tokenizer's folder, and check or prepare a recipe with it."""
    clean, given = folder / "clean", folder / "given"
    source = write_text(folder)
    keys = [f"data.source={source}", *SHORT_KEYS, "train.steps=60"]
    if ends_well(["prepare", str(QUICKSTART), *keys, f"data.cache_dir={folder / 'first'}"], "unchanged"):
        raise Finding("a right recipe is refused")
    shutil.copytree(next((folder / "first").rglob("tokenizer.json")).parent, clean)

    def case(draw: random.Random) -> int:
        shutil.rmtree(given, ignore_errors=True)
        shutil.rmtree(folder / "data", ignore_errors=True)
        shutil.copytree(clean, given)
        what = [spoil(given, draw) for _ in range(draw.choice([1, 1, 2]))]
        path = draw.choice([given, given, given / "tokenizer.json"])
        command = draw.choice([["recipe", "check"], ["prepare"]])
        changed = [*keys, f"data.tokenizer={path}", f"data.cache_dir={folder / 'data'}"]
        return ends_well([*command, str(QUICKSTART), *changed], f"{command} {path.name}: {what}")

    return case


def trained(folder: Path) -> Path:
    """Train a tiny run with several checkpoints in a separate process, and return its directory."""
    from tests.end_to_end.runs import Runs

    runs = Runs(folder, shared=folder / "shared")
    code, output = runs.train("a")
    if code:
        raise Finding(f"a right recipe ended with {code}\n{output}")
    return runs.path("a")


def checkpoints(folder: Path) -> Case:
    """Damage a run with checkpoints. A command should refuse it, or not need the damaged file; `export` must not
    succeed with damaged weights."""
    clean, run = trained(folder), folder / "given" / "a"
    changes = {"out_dir": str(run.parent)}

    def case(draw: random.Random) -> int:
        shutil.rmtree(run, ignore_errors=True)
        shutil.copytree(clean, run)
        recipe = yaml.safe_load((run / "recipe.yaml").read_text())
        recipe["run"].update(changes)
        (run / "recipe.yaml").write_text(yaml.safe_dump(recipe))
        newest = max((run / "checkpoints").iterdir())
        what = [spoil(draw.choice([run, newest, newest]), draw) for _ in range(draw.choice([1, 1, 2]))]
        out = str(folder / "out")
        shutil.rmtree(out, ignore_errors=True)
        command = draw.choice(
            [
                *(["export", str(run), "--out", out], ["export", str(run), "--out", out, "--weights", "anchor"]),
                *(["generate", str(run), "--tokens", "2"], ["runs", str(run.parent)]),
                *(["recipe", "check", str(run / "recipe.yaml")], ["compare", "--report", str(run)]),
            ]
        )
        weights_differ = any(
            not same(newest / path.name, path) for path in max((clean / "checkpoints").iterdir()).glob("*.distcp")
        )
        code = ends_well(command, f"{command} {what}")
        if command[0] == "export" and newest.joinpath("state.json").is_file() and weights_differ and code == 0:
            raise Finding(f"false success: {command} {what}")
        return code

    return case


def same(one: Path, other: Path) -> bool:
    """Return whether two files exist and have the same bytes."""
    return one.is_file() and other.is_file() and one.read_bytes() == other.read_bytes()


def exported_folders(folder: Path) -> Case:
    """Damage an exported folder, which `generate` reads and `eval` checks."""
    from llmtrain.eval.arguments import check_arguments

    clean, given = folder / "clean", folder / "given"
    if ends_well(["export", str(trained(folder)), "--out", str(clean)], "unchanged"):
        raise Finding("a right run is not exported")

    def case(draw: random.Random) -> int:
        shutil.rmtree(given, ignore_errors=True)
        shutil.copytree(clean, given)
        what = [spoil(given, draw) for _ in range(draw.choice([1, 1, 2]))]
        if draw.random() < 0.5:
            return ends_well(["generate", str(given), "--tokens", "2"], f"generate {what}")
        return ends_well(lambda: check_arguments([given], "small"), f"eval {what}")

    return case


def suites(folder: Path) -> Case:
    """Change suites, task files and comparisons."""
    from llmtrain.compare.comparison import load_comparison
    from llmtrain.eval.arguments import check_arguments

    model, tasks = folder / "model", folder / "tasks"
    for path in (model, tasks):
        path.mkdir()
    for name in ("config.json", "tokenizer_config.json", "pytorch_model.bin"):
        (model / name).write_text("{}")
    suite = {
        "about": "a suite",
        "batch_size": 4,
        "task_folders": ["tasks"],
        "tasks": [{"task": "mine", "few_shot": 2, "limit": 5, "show": ["acc"]}],
        "texts": [{"name": "t", "file": "text.txt", "separator": "x", "window": 64}],
        "samples": {"prompts": ["Once"], "tokens": 5, "temperature": 0.5, "top_k": 3, "seed": 1},
    }
    task = {"task": "mine", "dataset_kwargs": {"file": "text.txt"}, "metric_list": [{"metric": "acc"}], "include": None}
    write_text(folder)
    path, trial = folder / "suite.yaml", folder / "comparison.yaml"
    comparisons = [yaml.safe_load(file.read_text()) for file in sorted((ROOT / "recipes/compare").glob("*.yaml"))]

    def case(draw: random.Random) -> int:
        match draw.randrange(3):
            case 0:
                trial.write_text(yaml.safe_dump(mutate(draw.choice(comparisons), draw), allow_unicode=True))
                if draw.random() < 0.2:
                    damage(trial, draw)
                return ends_well(lambda: load_comparison(trial, []), f"compare {trial.read_bytes()[:3000]!r}")
            case 1:
                changed, inner = mutate(suite, draw), task
            case _:
                changed, inner = suite, mutate(task, draw)
        path.write_text(yaml.safe_dump(changed, allow_unicode=True))
        (tasks / "mine.yaml").write_text(yaml.safe_dump(inner, allow_unicode=True))
        if draw.random() < 0.2:
            damage(draw.choice([path, tasks / "mine.yaml"]), draw)
        what = f"eval {path.read_bytes()!r} {(tasks / 'mine.yaml').read_bytes()!r}"
        return ends_well(lambda: check_arguments([model], str(path), data_dir=folder), what)

    return case


KINDS: dict[str, Callable[[Path], Case]] = {
    kind.__name__: kind
    for kind in (
        *(recipes, overrides, variables, command_lines, run_files, token_files, texts, tokenizers, checkpoints),
        *(exported_folders, suites),
    )
}
