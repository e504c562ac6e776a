"""DeepSpeed configuration that a recipe's own keys stand for."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from llmtrain.config import ParallelSection

BUCKET = 50_000_000
"""Number of gradient values that are reduced together. DeepSpeed allocates buffers for them in advance, by
default for ten times as many."""


def deepspeed_config(parallel: ParallelSection, changes_in_forward: bool) -> dict[str, Any]:
    """Return the configuration for `deepspeed.initialize`. Keys in `parallel.deepspeed` override it.

    Batch sizes are only DeepSpeed's bookkeeping, because the engine marks where a step ends and averages over
    tokens.
    """
    zero: dict[str, Any] = {"stage": parallel.zero_stage, "overlap_comm": True, "contiguous_gradients": True}
    zero |= {"reduce_bucket_size": BUCKET}
    if parallel.zero_offload:
        zero["offload_optimizer"] = {"device": "cpu", "pin_memory": True}
    if parallel.zero_stage == 3:
        # A parameter that stays gathered over a synchronization would be computed with as it was before.
        zero |= {"stage3_param_persistence_threshold": 0, "stage3_max_reuse_distance": 0}
        zero |= {"sub_group_size": 2**62}  # so that each parameter group stays one flat tensor
        # DeepSpeed's own linear layer adds the bias in place, to what selective checkpointing keeps: it would be added twice.
        zero |= {"memory_efficient_linear": False}
        if changes_in_forward:
            zero |= {"stage3_prefetch_bucket_size": 0}
    # In stage 1 with bf16, fp32 here would switch DeepSpeed to an optimizer of another make, without shards of gradients.
    accumulates_in = "bf16" if (parallel.zero_stage, parallel.precision) == (1, "bf16") else "fp32"
    own = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": 0.0,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "bf16": {"enabled": parallel.precision == "bf16"},
        "communication_data_type": "fp32",
        "data_types": {"grad_accum_dtype": accumulates_in},
        "zero_optimization": zero,
    }
    return _merged(own, parallel.deepspeed)


def _merged(under: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """Return `under` with `over` laid over it, mapping by mapping."""
    result = dict(under)
    for key, value in over.items():
        nested = isinstance(value, Mapping) and isinstance(result.get(key), Mapping)
        result[key] = _merged(result[key], value) if nested else value
    return result
