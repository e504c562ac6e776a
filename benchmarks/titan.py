"""Training step of torchtitan (https://github.com/pytorch/torchtitan, 0.3) on the model and batches of an llmtrain recipe.

Trainer, model, loss and optimizer are torchtitan's own, unchanged; only the batches and the mesh's process group are ours.
torchtitan is made for GPUs. On a CPU, FlexAttention cannot train, so torchtitan's other attention (scaled_dot_product_attention)
is used, and its monitor of GPU memory reads zeros.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from types import SimpleNamespace
from typing import TYPE_CHECKING

from loops import on_gpu

if TYPE_CHECKING:
    import torch

    from llmtrain.config import Recipe

MODULE = "torchtitan"
NAMES = {"bf16": "bfloat16", "fp32": "float32"}
NEVER = 1_000_000_000


def release() -> str:
    """Return torchtitan's installed release, or an empty string."""
    try:
        return version(MODULE)
    except PackageNotFoundError:
        return ""


def is_installed() -> bool:
    """Return whether a release is installed whose trainer can be measured. Of release 0.2, only the model can be measured
    (`titan_model.py`)."""
    return bool(release()) and not release().startswith("0.2")


def titan_loop(recipe: Recipe, vocab_size: int, batches: Callable[[], Sequence[torch.Tensor]]) -> Callable[[], None]:
    """Return a function that takes one step of torchtitan's trainer: one replica, sharded over all ranks. The trainer uses the
    open process group."""
    if not on_gpu():
        _without_a_gpu()
    import torch
    from torchtitan.components.checkpoint import CheckpointManager
    from torchtitan.components.dataloader import BaseDataLoader
    from torchtitan.components.loss import ChunkedLossWrapper, CrossEntropyLoss
    from torchtitan.components.metrics import MetricsProcessor
    from torchtitan.components.optimizer import default_adamw
    from torchtitan.components.tokenizer import BaseTokenizer
    from torchtitan.config import CompileConfig, TrainingConfig
    from torchtitan.distributed.activation_checkpoint import FullAC, SelectiveAC
    from torchtitan.trainer import Trainer

    length = recipe.train.sequence_length

    class OurTokenizer(BaseTokenizer):
        """Tokenizer that is never used, because the batches are tokens already."""

        @dataclass(kw_only=True, slots=True)
        class Config(BaseTokenizer.Config):
            pass

        def __init__(self, config: Config, **_: object):
            super().__init__()

        def encode(self, *_: object) -> list[int]:
            raise NotImplementedError

        def decode(self, *_: object) -> str:
            raise NotImplementedError

        def get_vocab_size(self) -> int:
            return vocab_size

    class OurBatches(BaseDataLoader):
        @dataclass(kw_only=True, slots=True)
        class Config(BaseDataLoader.Config):
            pass

        def __init__(self, config: Config, **_: object):
            self._positions = torch.arange(length).expand(recipe.train.micro_batch, length)

        def __iter__(self) -> Iterator[tuple[dict[str, torch.Tensor], torch.Tensor]]:
            while True:
                for batch in batches():
                    inputs = {"input": batch[:, :-1]} | ({"positions": self._positions} if on_gpu() else {})
                    yield inputs, batch[:, 1:].long()

        def state_dict(self) -> dict[str, object]:
            return {}

        def load_state_dict(self, state_dict: dict[str, object]) -> None:
            pass

    checkpointing = {False: None, True: FullAC.Config(), "selective": SelectiveAC.Config()}
    os.environ.setdefault("LOCAL_RANK", "0")  # one rank needs no launcher here
    config = Trainer.Config(
        model_spec=_model(recipe, vocab_size),
        dump_folder=tempfile.mkdtemp(),
        loss=ChunkedLossWrapper.Config(loss_fn=CrossEntropyLoss.Config(global_vocab_size=vocab_size)),
        tokenizer=OurTokenizer.Config(),
        dataloader=OurBatches.Config(),
        optimizer=default_adamw(lr=recipe.optim.lr),
        metrics=MetricsProcessor.Config(log_freq=NEVER),
        checkpoint=CheckpointManager.Config(enable=False),
        training=TrainingConfig(
            local_batch_size=recipe.train.micro_batch,
            global_batch_size=recipe.train.global_batch,
            seq_len=length,
            steps=NEVER,
            mixed_precision_param=NAMES[recipe.parallel.precision],
            disable_cuda_graphs=not on_gpu(),
        ),
        activation_checkpoint=checkpointing[recipe.parallel.activation_checkpointing],
        compile=CompileConfig(enable=recipe.parallel.compile),
    )
    trainer = config.build()
    stream = trainer.batch_generator(trainer.dataloader)

    def step() -> None:
        trainer.step += 1
        trainer.gc_handler.run(trainer.step)
        trainer.train_step(stream)

    return step


def _model(recipe: Recipe, vocab_size: int) -> object:
    """Return the specification of torchtitan's Llama 3 in the sizes of the recipe's Llama."""
    from torch import nn
    from torchtitan.models.common import ComplexRoPE, Embedding, Linear, RMSNorm
    from torchtitan.models.common.attention import ScaledDotProductAttention
    from torchtitan.models.common.config_utils import get_attention_config, make_ffn_config, make_gqa_config
    from torchtitan.models.llama3.model import Llama3Model, Llama3TransformerBlock
    from torchtitan.models.llama3.parallelize import parallelize_llama
    from torchtitan.protocols.model_spec import ModelSpec

    from llmtrain.model import model_config

    sizes = model_config(recipe.model, vocab_size)
    width, heads = sizes.hidden_size, sizes.num_attention_heads
    normal = {"weight": lambda weight: nn.init.normal_(weight, std=0.02)}
    ones = {"weight": nn.init.ones_}

    def layer() -> Llama3TransformerBlock.Config:
        return Llama3TransformerBlock.Config(
            attention_norm=RMSNorm.Config(normalized_shape=width, param_init=ones),
            ffn_norm=RMSNorm.Config(normalized_shape=width, param_init=ones),
            attention=make_gqa_config(
                dim=width,
                n_heads=heads,
                n_kv_heads=sizes.num_key_value_heads,
                wqkv_param_init=normal,
                wo_param_init=normal,
                inner_attention=get_attention_config("flex") if on_gpu() else ScaledDotProductAttention.Config(),
                fuse_qkv=True,
                rope=ComplexRoPE.Config(dim=width // heads, max_seq_len=recipe.train.sequence_length),
            ),
            feed_forward=make_ffn_config(
                dim=width, hidden_dim=sizes.intermediate_size, w1_param_init=normal, w2w3_param_init=normal
            ),
        )

    return ModelSpec(
        name="llama3",
        flavor="ours",
        model=Llama3Model.Config(
            dim=width,
            vocab_size=sizes.vocab_size,
            tok_embeddings=Embedding.Config(num_embeddings=sizes.vocab_size, embedding_dim=width, param_init=normal),
            norm=RMSNorm.Config(normalized_shape=width, param_init=ones),
            lm_head=Linear.Config(in_features=width, out_features=sizes.vocab_size, param_init=normal),
            layers=[layer() for _ in range(sizes.num_hidden_layers)],
        ),
        parallelize_fn=parallelize_llama,
        pipelining_fn=None,
        post_optimizer_build_fn=None,
        state_dict_adapter=None,
    )


def _without_a_gpu() -> None:
    """Make torchtitan's modules accept the CPU as a device. This must precede the import of any of them."""
    import torch
    import torchtitan.tools.utils as tools

    tools.device_type, tools.device_module = "cpu", torch.cpu
    import torchtitan.components.metrics as metrics

    nothing = metrics.DeviceMemStats(0, 0, 0, 0, 0, 0)
    metrics.build_device_memory_monitor = lambda: SimpleNamespace(
        device_name="cpu", reset_peak_stats=lambda: None, get_peak_stats=lambda: nothing
    )
