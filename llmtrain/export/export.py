"""Export of a run's checkpoint to a folder that transformers loads, with a check that it is the trained model."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from llmtrain.data.tokenizer import vocab_size
from llmtrain.errors import UserError
from llmtrain.export.card import model_card
from llmtrain.export.folder import (
    CARD,
    DTYPES,
    Manifest,
    copy_tokenizer,
    locked,
    read_manifest,
    replacing,
    sizes,
    write_configs,
    write_manifest,
    write_weights,
)
from llmtrain.export.parity import check_logits, check_tokenizer
from llmtrain.export.source import Source, find_source
from llmtrain.export.weights import MEAN, ChosenWeights, FullTensorReader, WeightSource
from llmtrain.model import build, model_config
from llmtrain.train.console import format_si

MAX_SHARD_SIZE = "5GB"


@dataclass(frozen=True)
class Request:
    """Export options: weights, dtype and file size."""

    weights: WeightSource = MEAN
    dtype: str = "fp32"
    max_shard_size: str | None = None
    """Maximum size of a weight file. None: that of an existing export, or else MAX_SHARD_SIZE."""

    def __post_init__(self) -> None:
        if self.dtype not in DTYPES:
            raise UserError(f"--dtype is {self.dtype!r}; expected {' or '.join(DTYPES)}")

    def folder_of(self, source: Source) -> Path:
        """Return the default folder below the run; its name contains weights and dtype that are not the default."""
        weights = "" if self.weights == MEAN else f"-{self.weights}".replace(":", "")
        dtype = "" if self.dtype == "fp32" else f"-{self.dtype}"
        return source.run / "export" / f"step-{source.step:08d}{weights}{dtype}"

    def is_met_by(self, manifest: Manifest, source: Source) -> bool:
        """Return whether an existing export has the requested checkpoint, weights, dtype and file size."""
        return (
            (manifest.step, manifest.checkpoint) == (source.step, source.digest)
            and (manifest.weights, manifest.dtype) == (str(self.weights), self.dtype)
            and self.max_shard_size in (None, manifest.max_shard_size)
        )


def exported(run: Path, step: int | None = None) -> Path:
    """Return a folder that transformers loads, with the replicas' mean of `run` after `step` in fp32.

    `step` None means the newest checkpoint. A complete export of the same checkpoint is reused. In any case, the
    model card is updated with the results in the run's `eval/`. Raises UserError if the run cannot be exported, and
    TrainingError if the export is not the trained model.
    """
    return export(find_source(run, step), Request())[0]


def export(source: Source, request: Request, out: Path | None = None) -> tuple[Path, Manifest]:
    """Export `source` as requested, to `out` or the default folder; return the folder and its manifest.

    Existing exports, the model card and errors are handled as in `exported`.
    """
    final = out or request.folder_of(source)
    with locked(final):
        manifest = read_manifest(final)
        if manifest is None or not request.is_met_by(manifest, source):
            with replacing(final) as folder:
                manifest = _write(source, request, folder)
        (final / CARD).write_text(model_card(source, manifest))
    return final, manifest


def describe(folder: Path, manifest: Manifest) -> str:
    """Return the summary of an export that the command prints."""
    weights = [size for name, size in manifest.files.items() if name.endswith(".safetensors")]
    files = "1 file" if len(weights) == 1 else f"{len(weights)} files"
    return (
        f"{folder}: {manifest.weights} after step {manifest.step}, {format_si(manifest.parameters)} parameters in "
        f"{manifest.dtype}, {files} of weights ({format_si(sum(weights))}B)\n{manifest.parity.describe()}"
    )


def _write(source: Source, request: Request, folder: Path) -> Manifest:
    tokenizer = source.load_tokenizer()
    config = model_config(source.recipe.model, vocab_size(tokenizer))
    model = build(config, source.recipe.parallel.loss_chunk)
    weights = ChosenWeights(FullTensorReader(source.checkpoint), source.state, request.weights)
    weights.check_model(model)
    dtype, size = DTYPES[request.dtype], request.max_shard_size or MAX_SHARD_SIZE
    write_weights(weights, folder, dtype, size)
    of_training = model_config(source.recipe.model, vocab_size(tokenizer))  # `write_configs` changes `config`
    write_configs(config, type(model.causal_lm).__name__, tokenizer.eos_token_id, folder, dtype)
    copy_tokenizer(source.tokenizer_folder, folder)
    check_tokenizer(tokenizer, folder)
    parity = check_logits(of_training, weights, folder, dtype)
    manifest = Manifest(
        step=source.step,
        weights=str(request.weights),
        dtype=request.dtype,
        checkpoint=source.digest,
        max_shard_size=size,
        parameters=sum(shape.numel() for shape in weights.shapes.values()),
        parity=parity,
        files=sizes(folder),
    )
    write_manifest(folder, manifest)
    return manifest
