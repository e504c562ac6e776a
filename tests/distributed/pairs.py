"""Runs of tiny models in which every two compatible choices meet at least once: method, mesh, engine, model, and the recipe's
choices of precision, memory and messages."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from llmtrain.config import LRScheduleSection, Recipe
from llmtrain.errors import RecipeError
from llmtrain.recipe_check import check
from llmtrain.sync.methods import METHODS
from tests.distributed.fake_engine import choices
from tests.distributed.real_engine import GPT_NEO, LENGTH, LLAMA, TIED, Case
from tests.distributed.test_offload import late

TESTED_ELSEWHERE = ("muloco", "sparseloco", "des_loc", "snoo", "gpa")
"""Methods with tests of their own; test_zero has those under ZeRO. SNOO is DiLoCo, and MuLoCo is DiLoCo with Muon."""
FACTORS: dict[str, tuple[str, ...]] = {
    "method": tuple(method for method in METHODS if method not in TESTED_ELSEWHERE),
    "mesh": ("2x2", "4x1", "1x3", "3x1"),
    "engine": ("fsdp2", "zero1", "zero2", "zero3"),
    "schedule": ("blocking", "layerwise", "overlapped", "delayed", "wait_avoiding"),
    "wire": ("fp32", "bf16", "int8", "int4"),
    "model": ("llama", "gpt_neo", "tied"),
    "precision": ("fp32", "bf16", "fp64"),
    "recomputed": ("nothing", "all", "selective"),
    "offload": ("nothing", "anchors", "optimizer"),
    "optimizer": ("adamw", "sgd", "muon"),
    "forwards": ("1", "2"),
}
TABLE = """
synchronous       2x2  fsdp2  blocking       int8  tied     fp64  selective  anchors    adamw  2
synchronous       4x1  zero1  blocking       int4  llama    bf16  nothing    nothing    adamw  1
synchronous       4x1  fsdp2  blocking       int4  gpt_neo  fp64  all        anchors    muon   2
synchronous       1x3  zero2  blocking       bf16  llama    fp32  nothing    nothing    sgd    1
synchronous       3x1  zero3  blocking       fp32  gpt_neo  fp32  all        optimizer  adamw  1
local_sgd         2x2  fsdp2  blocking       int8  tied     fp32  nothing    anchors    adamw  1
local_sgd         4x1  zero1  layerwise      bf16  llama    fp32  nothing    nothing    sgd    1
local_sgd         1x3  zero3  delayed        fp32  llama    fp32  nothing    optimizer  adamw  1
local_sgd         3x1  fsdp2  overlapped     int4  gpt_neo  fp64  all        nothing    muon   1
local_sgd         3x1  zero2  delayed        fp32  llama    bf16  selective  nothing    adamw  2
post_local_sgd    2x2  zero1  blocking       int4  gpt_neo  fp32  nothing    optimizer  sgd    2
post_local_sgd    4x1  zero3  delayed        bf16  llama    fp32  all        nothing    adamw  1
post_local_sgd    1x3  zero2  overlapped     int8  tied     bf16  selective  nothing    adamw  1
post_local_sgd    3x1  fsdp2  layerwise      fp32  llama    fp64  nothing    anchors    muon   1
qsr               2x2  zero1  overlapped     fp32  llama    bf16  selective  nothing    adamw  1
qsr               4x1  zero2  layerwise      int8  gpt_neo  fp32  all        optimizer  adamw  1
qsr               1x3  fsdp2  blocking       bf16  gpt_neo  fp64  all        anchors    muon   2
qsr               3x1  zero3  delayed        int4  tied     fp32  nothing    nothing    sgd    2
slowmo            2x2  fsdp2  delayed        int8  tied     bf16  nothing    nothing    muon   1
slowmo            4x1  zero3  overlapped     bf16  llama    fp32  all        nothing    adamw  1
slowmo            1x3  zero1  blocking       int4  llama    fp32  nothing    optimizer  adamw  1
slowmo            3x1  fsdp2  delayed        fp32  gpt_neo  fp64  nothing    anchors    muon   2
slowmo            3x1  zero2  layerwise      fp32  llama    fp32  selective  nothing    sgd    1
diloco            2x2  fsdp2  delayed        bf16  gpt_neo  fp64  all        nothing    muon   1
diloco            4x1  zero2  overlapped     fp32  llama    fp32  nothing    nothing    adamw  1
diloco            1x3  zero1  blocking       int4  llama    bf16  nothing    anchors    sgd    2
diloco            3x1  zero3  layerwise      int8  tied     fp32  selective  optimizer  adamw  1
streaming_diloco  2x2  zero3  blocking       fp32  tied     fp32  all        anchors    sgd    2
streaming_diloco  4x1  fsdp2  delayed        int8  llama    fp64  selective  nothing    muon   1
streaming_diloco  1x3  zero2  overlapped     int4  llama    fp32  nothing    optimizer  adamw  1
streaming_diloco  3x1  zero1  layerwise      bf16  gpt_neo  bf16  nothing    nothing    adamw  1
co2               2x2  zero3  overlapped     bf16  gpt_neo  fp32  nothing    optimizer  adamw  1
co2               4x1  fsdp2  delayed        fp32  tied     fp32  selective  nothing    muon   1
co2               1x3  zero1  layerwise      fp32  llama    fp32  nothing    anchors    sgd    2
co2               1x3  zero2  blocking       int8  llama    bf16  all        nothing    adamw  1
co2               3x1  fsdp2  overlapped     int4  llama    fp64  nothing    nothing    muon   2
palsgd            2x2  zero1  delayed        int8  tied     fp32  nothing    nothing    sgd    1
palsgd            4x1  zero2  blocking       fp32  llama    bf16  nothing    optimizer  adamw  2
palsgd            4x1  fsdp2  wait_avoiding  bf16  llama    fp64  selective  nothing    muon   2
palsgd            1x3  zero3  overlapped     int4  llama    fp32  all        anchors    sgd    1
palsgd            3x1  fsdp2  layerwise      bf16  gpt_neo  fp64  selective  nothing    muon   1
wagma             2x2  zero2  wait_avoiding  fp32  llama    fp32  nothing    anchors    sgd    2
wagma             4x1  zero3  wait_avoiding  int4  tied     bf16  selective  optimizer  adamw  2
wagma             1x3  zero1  wait_avoiding  int8  gpt_neo  bf16  all        optimizer  adamw  1
wagma             3x1  fsdp2  delayed        bf16  gpt_neo  fp64  selective  nothing    muon   1
edit              2x2  zero2  layerwise      int4  gpt_neo  fp32  selective  nothing    sgd    1
edit              4x1  zero1  overlapped     int8  llama    bf16  nothing    anchors    adamw  1
edit              1x3  zero3  blocking       fp32  llama    fp32  nothing    optimizer  adamw  1
edit              3x1  fsdp2  delayed        bf16  tied     fp64  all        nothing    muon   2
a_edit            2x2  fsdp2  delayed        bf16  tied     fp64  nothing    nothing    sgd    2
a_edit            2x2  fsdp2  layerwise      int4  tied     fp32  nothing    anchors    muon   1
a_edit            4x1  zero2  blocking       int4  llama    bf16  nothing    anchors    adamw  1
a_edit            1x3  zero3  layerwise      fp32  llama    fp32  all        nothing    adamw  1
a_edit            3x1  zero1  blocking       int8  gpt_neo  fp32  selective  optimizer  adamw  1
"""
ROWS = [dict(zip(FACTORS, line.split(), strict=True)) for line in TABLE.strip().splitlines()]
STEPS, WARMUP, BATCH, PEAK = 5, 1, 12, {"adamw": 1e-2, "muon": 1e-2, "sgd": 0.5}
PENALTY = {"z": 2.0, "ema": 0.3, "min_rounds": 2, "temperature": 0.3, "clip": 0.5}
SCHEDULES = {"overlapped": {"kind": "overlapped", "steps": 1, "fragments": 2, "alpha": 0.5}}
ONE_LAYER = {"num_hidden_layers": 1}
MODELS = {
    "llama": LLAMA.model_copy(update={"config": {**LLAMA.config, **ONE_LAYER}}),
    "gpt_neo": GPT_NEO,  # one layer of each of the two kinds of attention
    "tied": TIED.model_copy(update={"config": {**TIED.config, **ONE_LAYER}}),
}
CHECKPOINTING = {"nothing": False, "all": True, "selective": "selective"}


def keys_of(row: Mapping[str, str]) -> dict[str, Any]:
    """Return the sections of a row's recipe."""
    lr = PEAK[row["optimizer"]]
    replicas, shard = map(int, row["mesh"].split("x"))
    engine, stage = (row["engine"][:4], row["engine"][4:]) if row["engine"] != "fsdp2" else ("fsdp2", "3")
    return {
        "optim": {"kind": row["optimizer"], "lr": lr, "clip_norm": 0.5},
        "schedule": {"kind": "cosine", "warmup_steps": 1},
        "sync": _sync_of(row, lr),
        "parallel": {
            "engine": engine,
            "zero_stage": int(stage),
            "replicas": replicas,
            "shards": shard,
            "precision": row["precision"],
            "activation_checkpointing": CHECKPOINTING[row["recomputed"]],
            "zero_offload": row["offload"] == "optimizer",
        },
    }


def _sync_of(row: Mapping[str, str], lr: float) -> dict[str, Any]:
    method = row["method"]
    periods = {
        "qsr": {"period": {"kind": "qsr", "base": 2, "alpha": lr * 2**0.5}},
        "a_edit": {"period": {"kind": "seconds", "every": 2, "min_steps": 1}},
        "synchronous": {},
    }
    sync = periods.get(method, {"period": {"kind": "steps", "every": 2}})
    if method not in ("synchronous", "post_local_sgd"):  # these two are synchronous by other keys
        sync |= {"warmup_steps": WARMUP}
    if METHODS[method].PRESET.get("pull") is not None:
        sync |= {"pull": {"probability": 0.3, "strength": 0.5, "batch": "keep"}}
    if METHODS[method].PRESET["reduction"] != "mean":
        sync |= {"reduction": {"kind": "edit_penalty", **PENALTY}}
    can_feed_back = method != "synchronous" and row["schedule"] != "wait_avoiding"
    wire = {"kind": row["wire"], "error_feedback": row["wire"] == "int4" and can_feed_back}
    wire["gradients"] = method == "synchronous" and row["wire"] != "fp32"
    schedule = SCHEDULES.get(row["schedule"], row["schedule"])
    if row["schedule"] == "overlapped" and "reduction" in sync:
        schedule = {**schedule, "steps": 2}  # norms take the first step, the message the second
    return {**sync, "schedule": schedule, "wire": wire, "offload": row["offload"] == "anchors"}


def recipe_of(row: Mapping[str, str]) -> Recipe:
    """Return a row's recipe."""
    keys = keys_of(row)
    sync = choices(row["method"], **keys.pop("sync"))
    batch = {"steps": STEPS, "sequence_length": LENGTH, "global_batch": BATCH, "micro_batch": 1}
    return Recipe.model_validate(
        {"run": {"name": "pairs"}, "model": MODELS[row["model"]], "train": batch, "sync": sync, **keys}
    )


def is_refused(row: Mapping[str, str]) -> bool:
    """Return whether a row's recipe is refused."""
    recipe = recipe_of(row)
    try:
        check(recipe, recipe.parallel.replicas * recipe.parallel.shards)
    except RecipeError:
        return True
    return False


def case_of(row: Mapping[str, str]) -> Case:
    """Return the case of a row."""
    keys = keys_of(row)
    parallel = keys["parallel"]
    section = {key: value for key, value in parallel.items() if key not in ("replicas", "shards")}
    return Case(
        choices(row["method"], **keys["sync"]),
        parallel["replicas"],
        parallel["shards"],
        MODELS[row["model"]],
        section,
        keys["optim"],
        LRScheduleSection(**keys["schedule"]),
        steps=STEPS,
        global_batch=BATCH,
        micro_batch=2 if row["forwards"] == "2" else BATCH,
        copies=late,
    )


def resumed_after(row: Mapping[str, str]) -> int:
    """Return a step in the second round. Layer-wise, it is the last of the first round, which the next forward synchronizes."""
    return 3 if row["schedule"] == "layerwise" else 4


OF_ENGINES = ("mesh", "precision", "recomputed", "offload", "optimizer", "forwards")
"""Choices that engines depend on. Schedules and wires see blocks of parameters, whatever the engine."""


def _resumed_rows() -> list[dict[str, str]]:
    """Return few rows that together have each level of each choice, and each engine with each level of the choices OF_ENGINES.
    These rows resume from a checkpoint. Tests on threads resume methods with every other choice (test_methods_resume.py)."""

    def met(row: Mapping[str, str]) -> set[tuple[str, ...]]:
        by_engine = {(row["engine"], name, row[name]) for name in OF_ENGINES}
        return by_engine | set(row.items())

    missing, chosen = set().union(*map(met, ROWS)), []
    while missing:
        chosen.append(max(ROWS, key=lambda row: len(met(row) & missing)))
        missing -= met(chosen[-1])
    return chosen


RESUMED = _resumed_rows()
