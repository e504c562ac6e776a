"""Writers for the files of an exported model: weights, configurations and tokenizer."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import torch
from huggingface_hub import split_torch_state_dict_into_shards
from safetensors.torch import save_file
from transformers import GenerationConfig, PretrainedConfig

from llmtrain.errors import UserError
from llmtrain.export.weights import ChosenWeights

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
        (folder / name).chmod(folder.stat().st_mode & 0o666)  # safetensors keeps its files to the user
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
    """Copy the training's tokenizer files unchanged."""
    for file in sorted(tokenizer.iterdir()):
        shutil.copyfile(file, folder / file.name)
