"""Export of a run's checkpoint to a folder that transformers loads, with a check that it is the trained model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from transformers import PreTrainedModel

from llmtrain.data.tokenizer import vocab_size
from llmtrain.export.card import model_card
from llmtrain.export.folder import (
    CARD,
    TORCH_DTYPES,
    Manifest,
    can_write,
    copy_tokenizer,
    destination,
    keep_others,
    locked,
    note,
    read_manifest,
    replacing,
    write_configs,
    write_manifest,
    write_weights,
    written_files,
)
from llmtrain.export.parity import check_logits, check_tokenizer
from llmtrain.export.request import Request, Step
from llmtrain.export.source import ChosenWeights, Source, find_source
from llmtrain.model import build, learned_positions, model_config
from llmtrain.quantities import counted, format_si

MAX_SHARD_SIZE = "5GB"


def exported(run: Path, step: Step | None = None) -> Path:
    """Return a folder that transformers loads, with the replicas' mean of `run` after `step` in fp32.

    `step` None means the newest checkpoint. A complete export of the same checkpoint is reused. In any case, the
    model card is updated with the results in the run's `eval/`. Raises UserError if the run cannot be exported, and
    TrainingError if the export is not the trained model.
    """
    return export(find_source(run, step), Request())[0]


def export(source: Source, request: Request, out: Path | None = None) -> tuple[Path, Manifest]:
    """Export `source` as requested, to `out` or the default folder; return the folder and its manifest.

    Existing exports are reused, the model card is updated, and errors are raised as in `exported`.
    """
    final = request.folder_of(source) if out is None else destination(out)
    if not can_write(final):  # perhaps another user's export, which is usable as it is
        manifest = read_manifest(final)
        if manifest is not None and request.is_met_by(manifest, source):
            return final, manifest
    with locked(final):
        manifest = read_manifest(final)
        if manifest is None or not request.is_met_by(manifest, source):
            with replacing(final) as folder:
                note(f"exporting {source.checkpoint}")
                manifest = _write(source, request, folder)
                (folder / CARD).write_text(model_card(source, manifest), encoding="utf-8")
                keep_others(final, folder)
        else:
            (final / CARD).write_text(model_card(source, manifest), encoding="utf-8")
    return final, manifest


def describe_export(folder: Path, manifest: Manifest) -> str:
    """Return the summary of an export that the command prints."""
    weights = [size for name, (size, _) in manifest.files.items() if name.endswith(".safetensors")]
    files = counted(len(weights), "file")
    return (
        f"{folder}: {manifest.weights} after step {manifest.step}, {format_si(manifest.parameters)} parameters in "
        f"{manifest.dtype}, {files} of weights ({format_si(sum(weights))}B)\n{manifest.parity.describe()}"
    )


def training_context(source: Source, model: PreTrainedModel) -> dict[str, Any]:
    """Return the manifest's values about the context of tokens in training. `trained_positions` is also None if the run began with
    other weights, because these may have been trained on longer sequences."""
    learned, train = learned_positions(model), source.recipe.train
    length, is_fresh = train.sequence_length, source.state.get("from_weights") is None
    return {
        "sequence_length": length,
        "trained_positions": length if learned is not None and learned > length and is_fresh else None,
        "separate_documents": train.document_mask or source.recipe.data.packing == "none",
    }


def _write(source: Source, request: Request, folder: Path) -> Manifest:
    source.check_digests()
    checkpoint = source.digest  # now, because training may delete the checkpoint once its tensors are read
    tokenizer = source.load_tokenizer()
    config = model_config(source.recipe.model, vocab_size(tokenizer))
    model = build(config, source.recipe.parallel.loss_chunk)
    weights = ChosenWeights(source.open_tensors(), source.state, request.weights)
    weights.check_model(model)
    source.check_recipe()
    dtype, size = TORCH_DTYPES[request.dtype], request.max_shard_size or MAX_SHARD_SIZE
    write_weights(weights, folder, dtype, size)
    of_training = model_config(source.recipe.model, vocab_size(tokenizer))  # `write_configs` changes `config`
    write_configs(config, type(model.causal_lm).__name__, tokenizer.eos_token_id, folder, dtype)
    copy_tokenizer(tokenizer, source.tokenizer_folder, folder)
    check_tokenizer(tokenizer, folder)
    parity = check_logits(of_training, weights, folder, dtype)
    manifest = Manifest(
        step=source.step,
        weights=str(request.weights),
        dtype=request.dtype,
        checkpoint=checkpoint,
        max_shard_size=size,
        parameters=sum(shape.numel() for shape in weights.shapes.values()),
        parity=parity,
        files=written_files(folder),
        **training_context(source, model.causal_lm),
    )
    write_manifest(folder, manifest)
    return manifest
