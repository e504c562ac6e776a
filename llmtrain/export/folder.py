"""Exported folders, which appear complete or not at all, and are recognized when the same export is requested again."""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Literal

import torch
from filelock import Timeout
from huggingface_hub import split_torch_state_dict_into_shards
from pydantic import BaseModel, ValidationError
from safetensors import SafetensorError
from safetensors.torch import save_file
from transformers import GenerationConfig, PretrainedConfig, PreTrainedTokenizerBase

from llmtrain.data.sentencepiece_model import MODEL_FILE, adds_space
from llmtrain.errors import ModelError, UserError, first_line
from llmtrain.export.parity import Parity
from llmtrain.export.request import DTYPES
from llmtrain.export.source import TOKENIZER_CONFIG, TOKENIZER_FILE, ChosenWeights
from llmtrain.files import set_aside
from llmtrain.run_files import EVALUATIONS, EXPORT_MANIFEST
from llmtrain.train.checkpoint_files import Digest, digests, find_corruption
from llmtrain.waiting import acquire

CARD = "README.md"
DEFAULT_TEMPLATE = "chat_template.jinja"
COMMAND = "export RUN --out FOLDER"
LOCK_SECONDS = 3600.0
"""Seconds to wait for another process that exports to the same folder."""


class Manifest(BaseModel, extra="forbid", frozen=True):
    """Manifest of an exported folder (export.json), which records what the folder was made from."""

    format: Literal[3] = 3
    step: int
    weights: str
    dtype: str
    checkpoint: str
    """Digest of the checkpoint."""
    max_shard_size: str
    parameters: int
    sequence_length: int
    """Tokens per training sequence."""
    trained_positions: int | None = None
    """Number of learned positions that training has reached, if the model has more. The vectors of the others are as initialized.
    None if training has reached all positions, or if this is unknown."""
    separate_documents: bool
    """True if training never put two documents in one context."""
    parity: Parity
    files: dict[str, Digest]
    """Size and digest of every file except this one and the model card, which every export command rewrites."""

    def has_weights_of(self, other: Manifest) -> bool:
        """Return whether both folders have the same weights in the same dtype."""
        return (self.checkpoint, self.weights, self.dtype) == (other.checkpoint, other.weights, other.dtype)


def read_manifest(folder: Path) -> Manifest | None:
    """Return the manifest of `folder`, or None if the folder is no export or one of its files is not as it was written."""
    manifest = recorded(folder)
    return None if manifest is None or find_corruption(folder, manifest.files) is not None else manifest


def recorded(folder: Path) -> Manifest | None:
    """Return the manifest of an exported model, or None if `folder` is no export. The folder's files are not checked."""
    try:
        return Manifest.model_validate_json((folder / EXPORT_MANIFEST).read_bytes())
    except (OSError, ValidationError):
        return None


def check_export(folder: Path) -> None:
    """Raise ModelError if `folder` is an export that is damaged or that an older version wrote."""
    if (folder / EXPORT_MANIFEST).is_file() and read_manifest(folder) is None:
        raise ModelError(
            f"{folder} is damaged, or an older version wrote it: its files are not those in {EXPORT_MANIFEST}; export the model again"
        )


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Write the manifest, which is the last file written before the folder gets its final name."""
    (folder / EXPORT_MANIFEST).write_text(manifest.model_dump_json(indent=2) + "\n", encoding="utf-8")


def written_files(folder: Path) -> dict[str, Digest]:
    """Return the size and digest of each file in `folder` except the model card."""
    return digests(folder, [file.name for file in sorted(folder.iterdir()) if file.name != CARD])


def note(text: str) -> None:
    """Print a line to stderr, because stdout is for results."""
    print(text, file=sys.stderr, flush=True)


def can_write(folder: Path) -> bool:
    """Return whether this process may write files in `folder` and next to it."""
    return os.access(folder, os.W_OK) and os.access(folder.parent, os.W_OK)


def destination(folder: Path, command: str = COMMAND) -> Path:
    """Return the absolute path of a folder to write, so that even `.` has a name. Links are followed, because renaming would replace
    a link itself. Raises UserError for `/`."""
    final = Path(os.path.realpath(folder))
    if not final.name:
        raise UserError(f"{folder} can't be replaced by an export; choose another folder: {command}")
    return final


@contextmanager
def locked(final: Path) -> Iterator[None]:
    """Hold a lock that lets one process at a time export to `final`. Waiting for it is announced.

    Raises UserError if the lock is not available within LOCK_SECONDS, or at once if the folder cannot be written.
    """
    path = final.parent / f".{final.name}.lock"
    waits = f"waiting for another process that exports to {final} (it holds {path}), at most {LOCK_SECONDS:g} s"
    try:
        lock = acquire(path, LOCK_SECONDS, lambda: note(waits))
    except Timeout:
        raise UserError(
            f"{final}: another process has been exporting it for {LOCK_SECONDS:g} s (it holds {path}); wait for it or stop it"
        ) from None
    except OSError as error:
        raise cannot_write(final, error) from None
    with lock:
        yield


def cannot_write(final: Path, error: Exception, command: str = COMMAND) -> UserError:
    """Return the error for an export that failed because `final` can't be written."""
    if isinstance(error, shutil.Error):  # of a folder: a list of (source, target, reason)
        error = OSError(None, error.args[0][0][2])
    reason = (error.strerror if isinstance(error, OSError) else None) or first_line(error)
    return UserError(f"{final} can't be written ({reason}); make room, or choose another folder: {command}")


def check_replaceable(final: Path, manifest: str, what: str, command: str) -> None:
    """Raise UserError if `final` exists and is neither an export nor an empty folder; see `replacing`."""
    if final.exists() and not (final.is_dir() and ((final / manifest).is_file() or not any(final.iterdir()))):
        raise UserError(f"{final} exists and is not {what}; choose another folder: {command}")


@contextmanager
def replacing(
    final: Path, manifest: str = EXPORT_MANIFEST, what: str = "an exported model", command: str = COMMAND
) -> Iterator[Path]:
    """Yield an empty temporary folder next to `final`, which then replaces `final`.

    If the caller's block raises, the temporary folder is deleted instead. Raises UserError if `final` exists and is
    neither an export nor an empty folder, or if it can't be written. `manifest` is the file by which an export is
    recognized; in messages, `what` is the name of such a folder, and `command` the command that makes it.
    """
    temporary, retired = (final.with_name(f".{final.name}.{word}") for word in ("tmp", "old"))
    if retired.exists() and not final.exists():  # a process was killed between the two renames below
        try:
            retired.rename(final)
        except OSError as error:
            raise cannot_write(final, error, command) from error
    check_replaceable(final, manifest, what, command)
    for leftover in (temporary, retired):  # left by a process that was killed
        shutil.rmtree(leftover, ignore_errors=True)
    try:
        temporary.mkdir()
        yield temporary
        is_current = final.exists() and final.samefile(".")
        if final.exists():
            final.rename(retired)
        temporary.rename(final)
        if is_current:
            note(
                f"{final} is a new folder; a shell whose working directory is the old one sees the new files after: cd {final}"
            )
    except (OSError, SafetensorError) as error:
        is_of_transformers = isinstance(error, OSError) and error.errno is None and not isinstance(error, shutil.Error)
        if is_of_transformers:  # transformers raises OSErrors without a number for other reasons
            raise
        raise cannot_write(final, error, command) from error
    finally:
        if retired.exists() and not final.exists():
            with suppress(OSError):  # the next start restores it
                retired.rename(final)
        shutil.rmtree(temporary, ignore_errors=True)
        if final.exists():
            shutil.rmtree(retired, ignore_errors=True)


def keep_others(final: Path, folder: Path) -> None:
    """Copy what the export `final`, if it exists, did not write itself, such as the results in eval/, to `folder`, which will replace
    `final`. If the manifest of `final` can't be read, only folders are copied, because an export writes none. Results of
    other weights than those in `folder` are renamed, because they would count as results of this model."""
    if not final.is_dir():
        return
    before, now = recorded(final), recorded(folder)
    try:
        written = {*json.loads((final / EXPORT_MANIFEST).read_text(encoding="utf-8"))["files"], EXPORT_MANIFEST, CARD}
    except (OSError, ValueError, LookupError, TypeError):
        written = None
    for path in final.iterdir():
        is_other = path.is_dir() if written is None else path.name not in written
        if is_other and not (folder / path.name).exists():
            if path.is_dir() and not path.is_symlink():
                shutil.copytree(path, folder / path.name, symlinks=True)
            else:
                shutil.copy2(path, folder / path.name, follow_symlinks=False)
    if before is not None and now is not None and not before.has_weights_of(now) and (folder / EVALUATIONS).is_dir():
        set_aside(folder / EVALUATIONS)


TORCH_DTYPES = dict(zip(DTYPES, (torch.float32, torch.bfloat16), strict=True))
"""torch's dtypes by the names in a request."""


def write_weights(weights: ChosenWeights, folder: Path, dtype: torch.dtype, max_shard_size: str) -> None:
    """Write model.safetensors, or several files with an index.

    A file has at most `max_shard_size` (such as "5GB"), unless a single tensor is larger. Only one file's weights
    are in memory at a time.
    """
    shapes = {name: torch.empty(shape, dtype=dtype, device="meta") for name, shape in weights.shapes.items()}
    plan = split_torch_state_dict_into_shards(
        shapes, filename_pattern="model{suffix}.safetensors", max_shard_size=max_shard_size
    )
    for name, members in plan.filename_to_tensors.items():
        save_file({key: weights.read(key).to(dtype) for key in members}, folder / name, metadata={"format": "pt"})
        (folder / name).chmod(folder.stat().st_mode & 0o666)  # safetensors lets only the owner read its files
    if plan.is_sharded:
        index = {"metadata": plan.metadata, "weight_map": plan.tensor_to_filename}
        (folder / "model.safetensors.index.json").write_text(
            json.dumps(index, indent=2, sort_keys=True) + "\n", encoding="utf-8"
        )


def write_configs(config: PretrainedConfig, architecture: str, eos: int, folder: Path, dtype: torch.dtype) -> None:
    """Write config.json and generation_config.json; `config` is changed in place.

    Training put only an eos token between texts, so eos also begins a text. Settings of rotary positions are also written under
    the keys of transformers 4, because other readers silently use their defaults if these keys are missing.
    """
    config.architectures, config.dtype = [architecture], dtype
    config.bos_token_id = config.eos_token_id = eos
    config.save_pretrained(folder)
    path = folder / "config.json"
    written = json.loads(path.read_text(encoding="utf-8"))
    rope = written.get("rope_parameters") or {}
    written |= {key: rope[key] for key in ("rope_theta", "partial_rotary_factor") if key in rope}
    if "rope_theta" in rope and rope.get("rope_type", "default") != "default":
        written["rope_scaling"] = rope
    path.write_text(json.dumps(written, indent=2, sort_keys=True) + "\n", encoding="utf-8")
    GenerationConfig(bos_token_id=eos, eos_token_id=eos, pad_token_id=eos).save_pretrained(folder)


def copy_tokenizer(tokenizer: PreTrainedTokenizerBase, files: Path, folder: Path) -> None:
    """Copy the files of the training tokenizer, and change its settings for special tokens. Special tokens that a text spells out,
    such as `<unk>`, are split like any other text, as in training. A bos token is replaced by eos, because training put only eos
    between texts, so the model has never seen another one. For the same reason, encoding adds no special tokens by default. Several
    chat templates, which transformers saves in a folder, are also put in the configuration, where older readers look for them."""
    for file in sorted(files.iterdir()):
        if file.is_file():
            shutil.copyfile(file, folder / file.name)
    path, backend = folder / TOKENIZER_CONFIG, folder / TOKENIZER_FILE
    settings = {**json.loads(path.read_text(encoding="utf-8")), "split_special_tokens": True}
    # transformers 4 knows neither this class, which transformers 5 also finds by its older name, nor a list under this key.
    if settings.get("tokenizer_class") == "TokenizersBackend":
        settings["tokenizer_class"] = "PreTrainedTokenizerFast"
    if isinstance(settings.get("extra_special_tokens"), list):
        settings["additional_special_tokens"] = settings.pop("extra_special_tokens")
    if isinstance(tokenizer.chat_template, dict):
        settings["chat_template"] = [{"name": name, "template": text} for name, text in tokenizer.chat_template.items()]
        (folder / DEFAULT_TEMPLATE).unlink(missing_ok=True)  # transformers would read it alone
    # llama.cpp reads tokenizer.model but ignores its setting for a leading space: it adds one to each text unless this key is false.
    if (files / MODEL_FILE).exists() and not adds_space(files / MODEL_FILE):
        settings["add_prefix_space"] = False
    if tokenizer.bos_token not in (None, tokenizer.eos_token):
        settings["bos_token"] = tokenizer.eos_token
    if tokenizer("a")["input_ids"] != tokenizer("a", add_special_tokens=False)["input_ids"]:
        settings |= {"add_bos_token": False, "add_eos_token": False}
        if backend.exists():
            content = json.loads(backend.read_text(encoding="utf-8"))
            content["post_processor"] = _without_templates(content.get("post_processor"))
            backend.write_text(json.dumps(content, ensure_ascii=False) + "\n", encoding="utf-8")
    path.write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")


def _without_templates(processor: dict[str, Any] | None) -> dict[str, Any] | None:
    """Return a post-processor of tokenizer.json without the steps that add special tokens."""
    steps = [processor] if processor is None or processor["type"] != "Sequence" else processor["processors"]
    kept = [step for step in steps if step is not None and step["type"] == "ByteLevel"]
    return kept[0] if kept else None
