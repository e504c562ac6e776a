"""Mistakes in mixtures and in texts per replica."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

MIXTURE = ("tests/unit/test_data_mixture.py",)
IDENTITY = ("tests/unit/test_text_identity.py",)
SITES = ("tests/unit/test_data_sites.py",)
LISTS = ("tests/unit/test_text_list.py",)
WEIGHTED = ("tests/distributed/test_sites.py::test_a_mixture_is_validated_by_weight",)
VALIDATED = ("tests/distributed/test_sites.py::test_every_site_is_validated_by_its_own_ranks",)
AT_ALL = ("tests/distributed/test_sites.py::test_what_one_site_lacks_is_an_error_at_all",)

MUTANTS = [
    Mutant(
        "mixture: remainders go to the first texts",
        "llmtrain/data/mixture.py",
        "by_remainder = sorted(range(len(weights)), key=lambda text: shares[text] - exact[text])",
        "by_remainder = list(range(len(weights)))",
        MIXTURE,
    ),
    Mutant(
        "mixture: every block in the same order",
        "llmtrain/data/mixture.py",
        "np.random.default_rng([self._seed, block])",
        "np.random.default_rng([self._seed, 0])",
        MIXTURE,
    ),
    Mutant(
        "mixture: a text begins anew in every block",
        "llmtrain/data/mixture.py",
        "return text, block * self.shares[text] + int(ranks[index])",
        "return text, int(ranks[index])",
        MIXTURE,
    ),
    Mutant(
        "mixture: what slow replicas have left counts as read",
        "llmtrain/data/mixture_loader.py",
        "counts -= self.order.count(range(start, stop))",
        "pass",
        MIXTURE,
    ),
    Mutant(
        "mixture: a resumed run forgets that a text has grown",
        "llmtrain/data/mixture_loader.py",
        "given = sizes or [()] * len(self.samples)",
        "given = [()] * len(self.samples)",
        MIXTURE,
    ),
    Mutant(
        "mixture: a hub text is prepared for its mean share only",
        "llmtrain/data/mixture.py",
        "return min(entries, -(-entries // BLOCK) * share)",
        "return entries * share // BLOCK",
        MIXTURE,
    ),
    Mutant(
        "mixture: texts are joined with their tails",
        "llmtrain/data/mixture_loader.py",
        "self._starts = np.cumsum([0, *(number * sequence_length for number in samples)])",
        "self._starts = np.cumsum([0, *map(len, texts)])",
        MIXTURE,
    ),
    Mutant(
        "mixture: texts are validated with equal weights",
        "llmtrain/train/run_texts.py",
        "own = joined([replace(self._everywhere(name), share=weights[name]) for name in self.texts])",
        "own = joined([self._everywhere(name) for name in self.texts])",
        WEIGHTED,
    ),
    Mutant(
        "mixture: token files are taken for tokens of the tokenizer that is trained",
        "llmtrain/train/prepare_data.py",
        "    check_token_files(data, texts)\n",
        "",
        ("tests/unit/test_wrong_tokens.py",),
    ),
    Mutant(
        "mixture: what is kept of the second text is looked for under another tokenizer",
        "llmtrain/train/prepare_data.py",
        "        own = with_tokenizer_of(prepared, section)\n        kept",
        "        own = section\n        kept",
        LISTS,
    ),
    Mutant(
        "sites: all replicas of a site read the same",
        "llmtrain/data/sites.py",
        "replica=own.index(shape.replica)",
        "replica=0",
        SITES,
    ),
    Mutant(
        "sites: a site that is absent is forgotten",
        "llmtrain/data/sites.py",
        'return states[0].get("absent", {}) | merged',
        "return merged",
        SITES,
    ),
    Mutant(
        "sites: a cursor belongs to the replica's number",
        "llmtrain/data/sites.py",
        'if not change.replicas_changed and [state["site"] for state in states] == self.sites:',
        "if not change.replicas_changed:",
        SITES,
    ),
    Mutant(
        "sites: cursors are merged as if the site had all replicas",
        "llmtrain/data/sites.py",
        "return self._batch // replicas * members",
        "return self._batch",
        SITES,
    ),
    Mutant(
        "sites: a rank sees its own replica's state alone",
        "llmtrain/reshard.py",
        "rule.combine(self, [rank[name] for rank in ranks])",
        "rule.combine(self, [rank[name] for rank in ranks[: self.old_shards]])",
        SITES,
    ),
    Mutant(
        "identity: a text that has grown passes",
        "llmtrain/data/text_identity.py",
        "if self.is_fixed and other.is_fixed and self.tokens != other.tokens:",
        "if False:",
        IDENTITY,
    ),
    Mutant(
        "identity: only the beginning of a text is compared",
        "llmtrain/data/text_identity.py",
        "start = max(start + WINDOW, int(start * SPACING))",
        "return",
        IDENTITY,
    ),
    Mutant(
        "sites: other tokenizers pass",
        "llmtrain/data/sites.py",
        "if text.tokenizer != first.tokenizer:",
        "if False:",
        AT_ALL,
    ),
    Mutant(
        "sites: a node prepares all texts",
        "llmtrain/data/text_list.py",
        "if not data.per_replica or replicas is None:",
        "if True:",
        LISTS,
    ),
    Mutant(
        "sites: replicas make different numbers of forward passes",
        "llmtrain/train/run_texts.py",
        "for _ in range(count - given):",
        "for _ in range(0):",
        VALIDATED,
    ),
    Mutant(
        "sites: losses are weighted equally, however many tokens",
        "llmtrain/train/run_texts.py",
        "batches=partial(_padded, own.batches, batches), share=site.validated)",
        "batches=partial(_padded, own.batches, batches), share=1.0)",
        VALIDATED,
    ),
    Mutant(
        "sites: a shard is checked by the ranks of another site",
        "llmtrain/train/run_texts.py",
        "return ChecksumScan(self.all.values(), ranks.index(world.rank), len(ranks))",
        "return ChecksumScan(self.all.values(), world.local_rank, world.local_size)",
        VALIDATED,
    ),
    Mutant(
        "sites: the nodes that are left read the first texts",
        "llmtrain/launch/torchrun.py",
        "for member in attempt.members]",
        "for member in range(attempt.nodes.count)]",
        LISTS,
    ),
    Mutant(
        "sites: a site may become another text",
        "llmtrain/train/run_dir.py",
        "for name in before.keys() & now.keys():",
        "for name in ():",
        LISTS,
    ),
    Mutant(
        "lists: an entry keeps the defaults instead of data's keys",
        "llmtrain/config/data.py",
        "return {**shared, **named, **entry}",
        "return {**named, **entry}",
        LISTS,
    ),
    Mutant(
        "lists: a base file's text stays beside the list above it",
        "llmtrain/recipe_loader.py",
        "data = _merge(_without_other_texts(data, layer.data), layer.data)",
        "data = _merge(data, layer.data)",
        LISTS,
    ),
    Mutant(
        "lists: each text of a mixture trains a tokenizer",
        "llmtrain/data/text_list.py",
        "if first is None or trained_size(section.tokenizer) is None:",
        "if True:",
        LISTS,
    ),
    Mutant(
        "lists: mixtures of other weights are compared",
        "llmtrain/validated_text.py",
        "texts = [_text_keys(entry) | weight for",
        "texts = [_text_keys(entry) for",
        LISTS,
    ),
    Mutant(
        "files: a folder that can't be listed is left out",
        "llmtrain/files.py",
        "os.walk(start, onerror=refuse)",
        "os.walk(start)",
        ("tests/unit/test_data_sources.py",),
    ),
    Mutant(
        "files: a folder is read again for each link to it",
        "llmtrain/files.py",
        "                below.clear()\n                continue\n",
        "                below.clear()\n",
        ("tests/unit/test_data_sources.py",),
    ),
    Mutant(
        "sites: an absent site forgets how many samples it had",
        "llmtrain/data/sites.py",
        'super().state_dict() | {"sizes": self.order.sizes, "site": self.site} | absent',
        'super().state_dict() | {"site": self.site} | absent',
        ("tests/unit/test_data_sites.py",),
    ),
    Mutant(
        "warnings: validation text that is trained on passes",
        "llmtrain/plan/recipe_warnings.py",
        "if _is_in(text, section.source) and not is_left_out:",
        "if False:",
        ("tests/unit/test_preflight_again.py",),
    ),
    Mutant(
        "sites: tokenizers with another eos token are the same",
        "llmtrain/data/sites.py",
        'f"{prepared.vocab_size} {prepared.eos_id} {content}"',
        'f"{prepared.vocab_size} {content}"',
        SITES,
    ),
    Mutant(
        "eval: windows are longer than training sequences",
        "llmtrain/eval/texts.py",
        "(positions, self.trained_length, LONGEST_WINDOW)",
        "(positions, LONGEST_WINDOW)",
        ("tests/unit/test_eval_texts.py",),
    ),
]
