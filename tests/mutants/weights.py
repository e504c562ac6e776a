"""Mistakes in runs that start from existing weights."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

FOLDERS, RUNS = "tests/unit/test_pretrained.py", "tests/distributed/test_initial_weights.py"

MUTANTS = [
    Mutant(
        "weights: ZeRO's masters stay rounded to bf16",
        "llmtrain/parallel/zero.py",
        'if read is not None and parallel.precision == "bf16":',
        "if False:",
        (RUNS,),
    ),
    Mutant(
        "weights: every rank of ZeRO gets the first rank's part",
        "llmtrain/parallel/zero.py",
        "master.copy_(group.part(full, self.mesh.shard_comms.rank))",
        "master.copy_(group.part(full, 0))",
        (RUNS,),
    ),
    Mutant(
        "weights: torch's engines start from random ones",
        "llmtrain/parallel/torch_engine.py",
        "initialize(model, block, seed, mesh.device, self.master_dtype, read)",
        "initialize(model, block, seed, mesh.device, self.master_dtype)",
        (RUNS,),
    ),
    Mutant(
        "weights: those of the first replica instead of the mean",
        "llmtrain/train/initial_weights.py",
        'self._written, prefixes = state["files"], validated_weights(state)',
        'self._written, prefixes = state["files"], ["replica0.weights."]',
        (RUNS,),
    ),
    Mutant(
        "weights: a value that is not finite is trained on",
        "llmtrain/train/safetensors_reader.py",
        "if not tensor.isfinite().all():",
        "if False:",
        (FOLDERS,),
    ),
    Mutant(
        "weights: quantized ones are taken for numbers",
        "llmtrain/train/safetensors_reader.py",
        "if part.get_dtype() not in FLOATS:",
        "if False:",
        (FOLDERS,),
    ),
    Mutant(
        "weights: an index may name any file of the machine",
        "llmtrain/pretrained.py",
        "if not is_bare_file_name(name):",
        "if False:",
        (FOLDERS,),
    ),
    Mutant(
        "weights: tensors that the model lacks are ignored",
        "llmtrain/train/initial_weights.py",
        "if one not in known and not one.endswith(DERIVED)]",
        "if False]",
        (FOLDERS,),
    ),
    Mutant(
        "weights: a tied head that differs is ignored",
        "llmtrain/train/initial_weights.py",
        "if not torch.equal(self._reader.read(copy), value):",
        "if False:",
        (FOLDERS,),
    ),
    Mutant(
        "weights: damage is not seen",
        "llmtrain/train/initial_weights.py",
        "if self._written is not None and tuple(self._written.get(name, ())) != found[name]:",
        "if False:",
        (FOLDERS, RUNS),
    ),
    Mutant(
        "weights: nodes start from different files",
        "llmtrain/train/initial_weights.py",
        "if files.get(name) != first.get(name)]",
        "if False]",
        (FOLDERS,),
    ),
    Mutant(
        "weights: another tokenizer is as good",
        "llmtrain/train/initial_weights.py",
        "if ids.get(token) != number:",
        "if False:",
        (FOLDERS,),
    ),
    Mutant(
        "weights: another architecture is as good if the shapes fit",
        "llmtrain/pretrained.py",
        "or mine.get(key) == theirs.get(key):",
        "or True:",
        (FOLDERS, RUNS),
    ),
    Mutant(
        "weights: a run forgets its architecture when they are gone",
        "llmtrain/pretrained.py",
        "_recorded(run, section.from_weights) or ",
        "",
        (FOLDERS,),
    ),
    Mutant(
        "weights: a run that has begun still looks for them",
        "llmtrain/train/initial_weights.py",
        "if name is None or checkpoint_folders(directory.checkpoints):",
        "if name is None:",
        (FOLDERS,),
    ),
    Mutant(
        "weights: a resumed run reads them again",
        "llmtrain/train/run.py",
        "open_initial_weights(recipe, mesh, prepared) if resume_from is None else None",
        "open_initial_weights(recipe, mesh, prepared)",
        ("tests/end_to_end/test_training.py::test_a_run_starts_from_another_and_later_needs_it_no_more",),
    ),
    Mutant(
        "weights: a resumed run forgets where it started",
        "llmtrain/train/checkpoint.py",
        '        self.from_weights = state.get("from_weights")\n',
        "",
        (RUNS,),
    ),
    Mutant(
        "weights: a start is not checked before its data is prepared",
        "llmtrain/launch/preflight.py",
        "weights=check_initial_weights(recipe))",
        "weights=None)",
        (FOLDERS,),
    ),
    Mutant(
        "weights: the hub's pickled files are downloaded too",
        "llmtrain/pretrained.py",
        "snapshot_download(name, allow_patterns=DOWNLOADED)",
        'snapshot_download(name, allow_patterns=[*DOWNLOADED, "*.bin"])',
        (FOLDERS,),
    ),
    Mutant(
        "model: a config's foreign keys are taken for the model's",
        "llmtrain/pretrained.py",
        "if key in known and not key",
        "if key not in other and not key",
        ("tests/unit/test_from_config.py",),
    ),
    Mutant(
        "model: GPT-2's projections start as large as other matrices",
        "llmtrain/model.py",
        "deviation = std_of_projections if is_projection else std",
        "deviation = std",
        ("tests/unit/test_model.py",),
    ),
    Mutant(
        "model: packed documents of Bloom see each other",
        "llmtrain/model.py",
        "if separator is not None and not is_masked:",
        "if False:",
        ("tests/unit/test_model.py",),
    ),
]
