"""Mistakes that cost memory or time on GPUs, in the code and in the plan."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

MUTANTS = [
    Mutant(
        "plan: masks of documents take no memory",
        "llmtrain/plan/memory.py",
        "+ size.masks * mask",
        "+ 0 * mask",
        ("tests/unit/test_plan_memory.py",),
    ),
    Mutant(
        "model: every layer makes a mask of documents of its own",
        "llmtrain/model.py",
        "if mask is not None and mask.dtype == torch.bool:",
        "if False:",
        ("tests/unit/test_plan_activations.py",),
    ),
    Mutant(
        "plan: without packing there are masks",
        "llmtrain/plan/memory.py",
        'recipe.train.document_mask and recipe.data.packing == "packed" and',
        "recipe.train.document_mask and",
        ("tests/unit/test_plan_memory.py",),
    ),
    Mutant(
        "plan: GPT-Neo's local layers have masks of the whole sequence",
        "llmtrain/plan/model_size.py",
        'config.attention_layers.count("local") if is_local else 0',
        "0",
        ("tests/unit/test_plan_activations.py",),
    ),
    Mutant(
        "plan: a window as long as the sequence is a window",
        "llmtrain/plan/model_size.py",
        "is_local = config.window_size < sequence_length",
        "is_local = config.window_size <= sequence_length",
        ("tests/unit/test_plan_activations.py",),
    ),
    Mutant(
        "plan: pinned memory is not rounded up",
        "llmtrain/plan/memory.py",
        "(1 << (block - 1).bit_length()) - block",
        "0 * block",
        ("tests/unit/test_plan_memory.py",),
    ),
    Mutant(
        "plan: a power of two is rounded up to the next one",
        "llmtrain/plan/memory.py",
        "(1 << (block - 1).bit_length())",
        "(1 << block.bit_length())",
        ("tests/unit/test_plan_memory.py",),
    ),
    Mutant(
        "plan: the rate is that of a matrix of ones",
        "llmtrain/plan/time_estimate.py",
        "matrix = torch.randn(size, size, generator=draw, device=device,",
        "matrix = torch.ones(size, size, device=device,",
        ("tests/unit/test_plan_show.py",),
    ),
    Mutant(
        "devices: the user's settings of torch's allocator are replaced",
        "llmtrain/train/devices.py",
        "if torch.cuda.is_available() and not any(name in os.environ for name in ALLOCATOR_VARIABLES):",
        "if torch.cuda.is_available():",
        ("tests/unit/test_devices.py",),
    ),
    Mutant(
        "launch: ranks on GPUs have torch's own allocator settings",
        "llmtrain/launch/torchrun.py",
        "    use_expandable_segments()\n",
        "",
        ("tests/unit/test_launch_again.py",),
    ),
    Mutant(
        "doctor: all nodes pin the memory of one",
        "llmtrain/doctor/run_checks.py",
        "pinned = max(Counter(nodes).values()) *",
        "pinned = len(nodes) *",
        ("tests/unit/test_doctor_ranks.py",),
    ),
    Mutant(
        "metrics: reserved memory is the sum over ranks",
        "llmtrain/train/metric_gather.py",
        'line.column("reserved_memory").max()',
        'line.column("reserved_memory").sum()',
        ("tests/unit/test_train_parts.py",),
    ),
    Mutant(
        "checkpoint: the host waits for each copy from a GPU",
        "llmtrain/train/checkpoint.py",
        'to("cpu", copy=True, non_blocking=True)',
        'to("cpu", copy=True)',
        ("tests/unit/test_checkpoint_state.py",),
    ),
    Mutant(
        "checkpoint: written before copies from a GPU have come",
        "llmtrain/train/checkpoint.py",
        "torch.cuda.current_stream().synchronize()  # for all copies at once",
        "pass",
        ("tests/unit/test_checkpoint_state.py",),
    ),
    Mutant(
        "engine: gradient norms are summed in fp32",
        "llmtrain/parallel/engine.py",
        "torch.linalg.vector_norm(gradient, dtype=torch.float64)",
        "torch.linalg.vector_norm(gradient)",
        ("tests/distributed/test_engine.py",),
    ),
]
