"""Mistakes in training on documents without packing."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

SAMPLES = ("tests/unit/test_data_documents.py",)
RUNS = ("tests/end_to_end/test_documents.py",)

MUTANTS = [
    Mutant(
        "documents: the tail of a long document is lost",
        "llmtrain/data/documents.py",
        "samples = -(-(ends - starts) // sequence_length)",
        "samples = np.maximum((ends - starts) // sequence_length, 1)",
        SAMPLES,
    ),
    Mutant(
        "documents: a document without an end is lost",
        "llmtrain/data/documents.py",
        "        if start < len(tokens):\n",
        "        if False:\n",
        SAMPLES,
    ),
    Mutant(
        "documents: the starts of fewer tokens pass for those of more",
        "llmtrain/data/documents.py",
        "        and starts[-1] == len(tokens)\n",
        "",
        SAMPLES,
    ),
    Mutant(
        "documents: a later part begins without the token before it",
        "llmtrain/data/documents.py",
        "self.tokens.window(start - 1, end - start + 1)",
        "np.concatenate([[self._eos_id], self.tokens.window(start, end - start)])",
        SAMPLES,
    ),
    Mutant(
        "documents: a limit does not cut the last one",
        "llmtrain/data/documents.py",
        "np.minimum(self._starts[samples + 1], len(self.tokens))",
        "self._starts[samples + 1]",
        SAMPLES,
    ),
    Mutant(
        "documents: units in the order of their lengths",
        "llmtrain/data/document_loader.py",
        "units[draw.permutation(len(units))]",
        "units",
        SAMPLES,
    ),
    Mutant(
        "documents: windows begin in the batch that mixes epochs",
        "llmtrain/data/document_loader.py",
        "-(-part.start // batch) * batch",
        "part.start // batch * batch",
        SAMPLES,
    ),
    Mutant(
        "documents: units of the new micro-batch after a resume",
        "llmtrain/data/document_loader.py",
        'self._set_order(sizes, state["unit"])',
        "self._set_order(sizes, self.micro_batch)",
        SAMPLES,
    ),
    Mutant(
        "documents: a replica divides by its own tokens",
        "llmtrain/data/document_loader.py",
        "self._samples(0, self.global_batch)",
        "self._samples(self.shape.first, self.shape.per_rank)",
        SAMPLES,
    ),
    Mutant(
        "documents: the trainer does not say how many tokens the batch has",
        "llmtrain/train/trainer.py",
        "forward_backward(micro_batches, self.loader.replica_tokens)",
        "forward_backward(micro_batches)",
        RUNS,
    ),
    Mutant(
        "documents: padding counts as tokens",
        "llmtrain/train/metrics.py",
        "tokens = count_tokens(micro_batches)",
        "tokens = count_positions(micro_batches)",
        RUNS,
    ),
    Mutant(
        "documents: ZeRO divides by the tokens of all ranks before it averages over them",
        "llmtrain/parallel/zero.py",
        "replica_tokens / ranks",
        "replica_tokens",
        ("tests/distributed/test_zero.py::test_gradients_of_padded_documents_are_those_of_a_loop_over_documents",),
    ),
    Mutant(
        "documents: a layer is compiled for each length",
        "llmtrain/parallel/wrapping.py",
        "torch.compile(forward, dynamic=lengths_vary)",
        "torch.compile(forward, dynamic=False)",
        ("tests/unit/test_compile.py",),
    ),
    Mutant(
        "documents: losses with and without other documents before them are ranked",
        "llmtrain/validated_text.py",
        "self.contexts[key] != other.contexts[key]:",
        "False:",
        ("tests/unit/test_compare_runs.py",),
    ),
    Mutant(
        "documents: a run's length in tokens is accepted",
        "llmtrain/recipe_check.py",
        'if train.tokens is not None and recipe.data.packing == "none":',
        "if False:",
        ("tests/unit/test_recipe_wrong.py",),
    ),
    Mutant(
        "documents: blocks are accepted, and not shuffled as such",
        "llmtrain/recipe_check.py",
        'if recipe.data.shuffle == "blocks" and recipe.data.packing == "none":',
        "if False:",
        ("tests/unit/test_recipe_wrong.py",),
    ),
    Mutant(
        "documents: garbage fills the padding",
        "llmtrain/compare/faults.py",
        "b == IGNORE_INDEX,",
        "b == -1,",
        ("tests/unit/test_comparison.py",),
    ),
    Mutant(
        "export: a masked run counts as one of joined documents",
        "llmtrain/export/export.py",
        'train.document_mask or source.recipe.data.packing == "none"',
        'source.recipe.data.packing == "none"',
        ("tests/unit/test_eval_texts.py",),
    ),
    Mutant(
        "export: one of an earlier version is reused",
        "llmtrain/export/export.py",
        "manifest is not None and manifest.separate_documents is not None",
        "manifest is not None",
        ("tests/unit/test_export.py",),
    ),
    Mutant(
        "eval: separate documents lack the token after them",
        "llmtrain/eval/texts.py",
        "torch.cat((document, document[:1]))",
        "torch.cat((document, document[-1:]))",
        ("tests/unit/test_eval_texts.py",),
    ),
    Mutant(
        "eval: losses in other contexts are tested against each other",
        "llmtrain/eval/table.py",
        " or _reads_apart(a, row) != _reads_apart(b, row):",
        ":",
        ("tests/unit/test_eval.py",),
    ),
]
