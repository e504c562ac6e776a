"""torchtitan's Llama 3 model of release 0.2.2, which torch 2.11 can run, in the loop of `loops.plain_step`.

The release's trainer needs packages that its model does not need (data sets, checkpoints, pipelines), and later releases need
torch 2.12. So only the model's own files are loaded. Stand-ins for the modules around them define the few names that these files
import. The model is sharded and compiled as by torchtitan's `apply_fsdp` and `apply_compile`. The loss is that of its
`cross_entropy_loss`, over all logits at once. `titan.py` has the trainer of later releases.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from loops import plain_step
from titan import MODULE, release

if TYPE_CHECKING:
    import torch

    from llmtrain.config import Recipe
    from llmtrain.parallel.mesh import Mesh

RELEASE = "0.2"
FILES = "models.llama3.model"


def is_installed() -> bool:
    """Return whether the release is installed whose model is loaded here."""
    return release().startswith(RELEASE)


def titan_model_loop(
    recipe: Recipe, mesh: Mesh, vocab_size: int, batches: Callable[[], Sequence[torch.Tensor]]
) -> Callable[[], None]:
    """Return a function that takes one training step of the model, with the sizes of the recipe's Llama, sharded over all
    ranks."""
    import torch
    import torch.nn.functional as F
    from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

    from llmtrain.model import model_config

    sizes = model_config(recipe.model, vocab_size)
    model, args = _model_classes()
    with torch.device("meta"):
        built = model(
            args(
                dim=sizes.hidden_size,
                n_layers=sizes.num_hidden_layers,
                n_heads=sizes.num_attention_heads,
                n_kv_heads=sizes.num_key_value_heads,
                vocab_size=sizes.vocab_size,
                multiple_of=1,
                ffn_dim_multiplier=(sizes.intermediate_size + 0.5) / (8 * sizes.hidden_size // 3),
                max_seq_len=recipe.train.sequence_length,
            )
        )
    inner = built.layers["0"].feed_forward.w1.out_features
    assert inner == sizes.intermediate_size, f"its inner size is {inner}, not the recipe's {sizes.intermediate_size}"
    assert not recipe.parallel.activation_checkpointing, "its checkpointing is not loaded"

    def mean_loss_of(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten(0, 1))

    if recipe.parallel.compile:
        for name, layer in built.layers.named_children():
            built.layers.register_module(name, torch.compile(layer, fullgraph=True))
        mean_loss_of = torch.compile(mean_loss_of)
    dtype = {"bf16": torch.bfloat16, "fp32": torch.float32}[recipe.parallel.precision]
    shard = {
        "mesh": mesh.shard_mesh["shard"],
        "mp_policy": MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32),
    }
    fully_shard(built.tok_embeddings, **shard)
    for layer in built.layers.values():
        fully_shard(layer, **shard)
    fully_shard([built.norm, built.output], reshard_after_forward=False, **shard)
    fully_shard(built, **shard)
    for module in built.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
    built.to_empty(device=mesh.device)
    with torch.no_grad():
        built.init_weights(mesh.device)
    return plain_step(
        built, lambda batch: mean_loss_of(built(batch[:, :-1]), batch[:, 1:].long()), batches, mesh.device
    )


def _model_classes() -> tuple[Any, Any]:
    """Return torchtitan's classes Transformer and TransformerModelArgs."""
    if f"{MODULE}.{FILES}.model" not in sys.modules:
        _replace_packages()
    classes = importlib.import_module(f"{MODULE}.{FILES}.model")
    return classes.Transformer, importlib.import_module(f"{MODULE}.{FILES}.args").TransformerModelArgs


def _replace_packages() -> None:
    """Replace the packages around torchtitan's model files by empty ones, and modules that import many others by stand-ins with
    only the names that these files need."""
    from torch import nn

    folder = Path(importlib.util.find_spec(MODULE).origin).parent

    def module(name: str, **names: object) -> None:
        made = sys.modules[f"{MODULE}.{name}"] = ModuleType(f"{MODULE}.{name}")
        vars(made).update(names)

    whole = sys.modules[MODULE] = ModuleType(MODULE)
    vars(whole)["__path__"] = [str(folder)]
    for package in ("components", "models", "models.llama3", FILES, "protocols", "tools"):
        module(package, __path__=[str(folder.joinpath(*package.split(".")))])
    module("components.tokenizer", BaseTokenizer=object)
    module("config", JobConfig=object)
    module("models.utils", trunc_normal_=nn.init.trunc_normal_, get_dense_model_nparams_and_flops=None)
    protocol = importlib.import_module(f"{MODULE}.protocols.model").ModelProtocol
    module("protocols.train_spec", ModelProtocol=protocol)
