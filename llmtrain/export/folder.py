"""Exported folders, which appear complete or not at all, and are recognized when the same export is requested again."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

import torch
from filelock import FileLock, Timeout
from huggingface_hub import split_torch_state_dict_into_shards
from pydantic import BaseModel, ValidationError
from safetensors.torch import save_file
from transformers import GenerationConfig, PretrainedConfig

from llmtrain.errors import UserError
from llmtrain.export.parity import Parity
from llmtrain.export.weights import ChosenWeights

MANIFEST = "export.json"
CARD = "README.md"
LOCK_SECONDS = 3600.0
"""Seconds to wait for another process that exports to the same folder."""


class Manifest(BaseModel, extra="forbid", frozen=True):
    """Manifest of an exported folder (export.json), which records what the folder was made from."""

    format: Literal[1] = 1
    step: int
    weights: str
    dtype: str
    checkpoint: str
    """Digest of the checkpoint."""
    max_shard_size: str
    parameters: int
    parity: Parity
    files: dict[str, int]
    """Bytes of every file except this one and the model card, which every export command rewrites."""


def read_manifest(folder: Path) -> Manifest | None:
    """Return the manifest of `folder`, or None unless it is an export whose files all have their recorded size."""
    try:
        manifest = Manifest.model_validate_json((folder / MANIFEST).read_bytes())
    except (OSError, ValidationError):
        return None
    whole = all((folder / name).is_file() and (folder / name).stat().st_size == n for name, n in manifest.files.items())
    return manifest if whole else None


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Write the manifest, which is the last file written before the folder gets its final name."""
    (folder / MANIFEST).write_text(manifest.model_dump_json(indent=2) + "\n")


def sizes(folder: Path) -> dict[str, int]:
    """Return the bytes of each file in `folder` except the model card."""
    return {file.name: file.stat().st_size for file in sorted(folder.iterdir()) if file.name != CARD}


@contextmanager
def locked(final: Path, timeout: float = LOCK_SECONDS) -> Iterator[None]:
    """Hold a lock that lets one process at a time export to `final`.

    Raises UserError if the lock is not available within `timeout` seconds, or if the folder cannot be written.
    """
    lock = FileLock(final.parent / f".{final.name}.lock", timeout=timeout)
    try:
        final.parent.mkdir(parents=True, exist_ok=True)
        lock.acquire()
    except Timeout:
        raise UserError(
            f"{final}: another process has been exporting it for {timeout:g} s (it holds {lock.lock_file}); wait for it "
            "or stop it"
        ) from None
    except OSError as error:
        raise UserError(f"{final} can't be written ({error.strerror}); choose another folder with --out") from None
    try:
        yield
    finally:
        lock.release()


@contextmanager
def replacing(final: Path) -> Iterator[Path]:
    """Yield an empty temporary folder next to `final`, which then replaces `final`.

    If the caller's block raises, the temporary folder is deleted instead. Raises UserError if `final` exists and is
    neither an export nor an empty folder.
    """
    if final.exists() and not (final.is_dir() and ((final / MANIFEST).is_file() or not any(final.iterdir()))):
        raise UserError(f"{final} exists and is not an exported model; choose another folder with --out")
    temporary, retired = (final.with_name(f".{final.name}.{word}") for word in ("tmp", "old"))
    for leftover in (temporary, retired):  # left by a process that was killed
        shutil.rmtree(leftover, ignore_errors=True)
    temporary.mkdir()
    try:
        yield temporary
        if final.exists():
            final.rename(retired)
        temporary.rename(final)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
        shutil.rmtree(retired, ignore_errors=True)


DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
"""Available dtypes for the weights."""


def write_weights(weights: ChosenWeights, folder: Path, dtype: torch.dtype, max_shard_size: str) -> list[str]:
    """Write model.safetensors, or several files with an index, and return the names of the weight files.

    A file has at most `max_shard_size` (such as "5GB"), unless a single tensor is larger. Only one file's weights
    are in memory at a time. Raises UserError if `max_shard_size` is not a size.
    """
    shapes = {name: torch.empty(shape, dtype=dtype, device="meta") for name, shape in weights.shapes.items()}
    try:
        plan = split_torch_state_dict_into_shards(
            shapes, filename_pattern="model{suffix}.safetensors", max_shard_size=max_shard_size
        )
    except ValueError:
        raise UserError(f"--max-shard-size is {max_shard_size!r}; expected a size such as 500MB or 5GB") from None
    for name, members in plan.filename_to_tensors.items():
        save_file({key: weights.read(key).to(dtype) for key in members}, folder / name, metadata={"format": "pt"})
        (folder / name).chmod(folder.stat().st_mode & 0o666)  # safetensors lets only the owner read its files
    if plan.is_sharded:
        index = {"metadata": plan.metadata, "weight_map": plan.tensor_to_filename}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2, sort_keys=True) + "\n")
    return list(plan.filename_to_tensors)


def write_configs(
    config: PretrainedConfig, architecture: str, eos: int, folder: Path, dtype: torch.dtype
) -> PretrainedConfig:
    """Write config.json and generation_config.json; return `config`, which is changed in place.

    Training put an eos token between texts and nothing else, so eos also begins a text.
    """
    config.architectures, config.dtype = [architecture], dtype
    config.bos_token_id = config.eos_token_id = eos
    config.save_pretrained(folder)
    GenerationConfig(bos_token_id=eos, eos_token_id=eos, pad_token_id=eos).save_pretrained(folder)
    return config


def copy_tokenizer(tokenizer: Path, folder: Path) -> None:
    """Copy the training tokenizer's files unchanged."""
    for file in sorted(tokenizer.iterdir()):
        shutil.copyfile(file, folder / file.name)
