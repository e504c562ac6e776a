"""Tables of recipe keys and methods for the documentation, generated from the code by `make docs`.

The output is all of docs/recipes.md, the schema of recipe files for editors (recipes/schema.json), the table of methods
in README.md, and the tables of conflicting choices in docs/methods.md.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from llmtrain.recipe_keys import in_code, key_groups, sections
from llmtrain.recipe_schema import schema_text
from llmtrain.sync.compatibility import CHOICES, RULES, conflict_between
from llmtrain.sync.methods import METHODS, inner_preset

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "recipes.md"
SCHEMA = ROOT / "recipes" / "schema.json"
README = ROOT / "README.md"
METHODS_PAGE = ROOT / "docs" / "methods.md"
METHODS_BEGIN, METHODS_END = "<!-- methods: written by `make docs` -->", "<!-- end of methods -->"
COMPOSITION_BEGIN, COMPOSITION_END = "<!-- composition: written by `make docs` -->", "<!-- end of composition -->"
INTRODUCTION = """\
# Recipes

<!-- Written by `make docs` from llmtrain/config; change it there. -->

A recipe is a YAML file that describes a complete run, in sections of keys. Each key has a default, and a recipe gives only the
keys that differ.

    llmtrain recipe check RECIPE        # would it start on this machine, and how? (--processes N: as N ranks on a cluster?)
    llmtrain recipe show RECIPE         # every key's value, the model's size, memory, traffic, time (--gpu h100: on that card)
    llmtrain recipe keys [SECTION]      # keys with values, defaults and meanings, as on this page
    llmtrain recipe diff A B            # keys in which two recipes or runs differ, after base files and presets
    llmtrain recipe schema              # JSON schema, for editors

Editors with the YAML language server complete and check keys by `recipes/schema.json`, which each recipe names in a comment:
`# yaml-language-server: $schema=schema.json`. `llmtrain recipe check` also prints the mesh and the memory that each process
would need, with `--processes` on GPUs.

**Base files.** `base: FILE` or `base: [FILE, ...]` at the top names other recipes, with paths relative to this one. Their
values hold where this recipe gives none. Base files may have base files themselves.

**Overrides.** Every command that takes a recipe accepts keys after it. Values are YAML. Values that YAML reads differently than
they look are refused: numbers in another base (`0400`, `1:30`), comments, text that YAML changes, and empty values. For no
value, give `null`; for empty text, `'""'`, with quotes within quotes. There are three equivalent forms:

    llmtrain launch recipes/quickstart.yaml optim.lr=1e-2 --run.name=lower_lr --sync.period.every 32

**Precedence.** Values come from layers: the method's preset, base files in their order, the file itself, the command line.
Later layers win. Mappings merge key by key, but a `sync.period`, `reduction`, `outer`, `schedule` or `wire` of another kind
replaces the old one completely, so on the command line give a kind before its other keys. There is no interpolation (`${...}`),
and the environment is not read.

**Another method.** If a layer names another method than the layers before it, their `reduction`, `outer`, `schedule`, `pull`
and `moments` are dropped, because they were chosen for the old method. Their period, warm-up and wire stay, so that methods are
compared at the same round length. Exceptions:

- A period of another kind than the new method's is dropped.
- A key that the old or the new method chooses itself is dropped: the wire (`streaming_diloco`, `sparseloco`), `warmup_until_lr`
  (`post_local_sgd`), `optim.kind` and `optim.muon` (`muloco`).
- If the new method averages gradients in every step, the warm-up and a wire that is not for gradients are dropped.

**Texts.** A recipe names one text (`data.source`), a mixture (`data.sources`) or a text for each replica (`data.per_replica`):
[texts.md](texts.md). A layer that names texts replaces those of the layers before it; a file in their `data.validation` stays.

**Short forms.** A word stands for a mapping with that `kind` (`sync.schedule=layerwise`), a number for a period of steps
(`sync.period=10`), and a name for a suite (`eval.suite=small`).

**Ready-made tokens.** `data.source` may be token files of nanoGPT, llm.c, Megatron-LM or NumPy.
`llmtrain prepare RECIPE --export FOLDER --format KIND` writes prepared tokens in these formats. [tokens.md](tokens.md) describes
both, and SentencePiece models and trained tokenizers.

**Continued pretraining.** With `model.from_weights`, a new run starts from existing weights, under any method and engine:

    bash launch/train.sh recipes/quickstart.yaml run.name=further run.seed=5 model.from_weights=runs/quickstart

It names a run (its newest checkpoint), one of its checkpoints, an export, or a transformers folder or hub name. A recipe
without `model.type`, `config` and `from_config` has the architecture of the weights, so this recipe for a model from elsewhere
is complete:

    model: {from_weights: models/stories260K}
    data: {source: stories.txt, tokenizer: models/stories260K}
    train: {tokens: 10000000}

From a checkpoint, the run takes the mean of the replicas, as its validation does. Step, optimizer, learning rate and data begin
anew; the same seed and text give the same samples in the same order. Master parameters are fp32, whatever the dtype of the
files. Another architecture or tokenizer, missing or unexpected tensors, damaged files and pickled ones (`pytorch_model.bin`)
are refused in one line. A tokenizer may have more tokens than that of the weights, and a model with rotary positions may have
more positions. The folder's path and digest are recorded in every checkpoint, in `summary.json` and in the model card of an
export.

**What is refused.** Unknown keys, values of another type, and combinations that can't run are refused before anything starts.
The message gives the reason; for an unknown key, it names a similar one. If a value has less effect than it seems to have, such
as a period longer than the run, `recipe check` and the start of training print a warning.
"""
PRESETS = """\
The next table has the keys of `sync` that each method sets, and those of `optim` that `muloco` sets. A recipe that gives part of a
mapping keeps the preset's other values. If it names another kind, or if the preset has no value, the defaults below hold.

"""


def recipe_reference() -> str:
    """Return the complete docs/recipes.md as Markdown."""
    parts = [INTRODUCTION]
    for section in sections():
        for group in key_groups(section):
            heading = "##" if group.path == section else "###"
            parts.append(f"{heading} `{group.title}`\n\n{group.description}\n")
            rows = ((f"`{key.name}`", key.values, key.default, key.meaning) for key in group.keys)
            parts.append(_table(("key", "value", "default", "meaning"), rows))
            if group.path == "sync":
                parts.append(_presets())
    return "\n".join(parts)


def methods_table() -> str:
    """Return README's table of the methods and their purposes."""
    rows = []
    for name, method in METHODS.items():
        idea = method.__doc__.split("\n")[0].partition(": ")[2].rstrip(".")
        paper = method.PAPER.removeprefix("arXiv ")
        link = f"[{paper}](https://arxiv.org/abs/{paper})" if paper != method.PAPER else ""
        file = f"[`{name}`](llmtrain/sync/methods/{name}.py)"
        rows.append((file, link, idea, method.CHOOSE_WHEN))
    return _table(("`sync.method`", "paper", "idea", "choose it when"), rows)


def composition_table() -> str:
    """Return what docs/methods.md shows of the kinds of two choices: a table of combinations, and why some are excluded."""
    pairs = [(choice, kind) for choice, kinds in CHOICES.items() for kind in kinds]
    concerned = [pair for pair in pairs if any(conflict_between(*pair, *other) for other in pairs)]
    columns = [pair for pair in concerned if pair[0] in ("schedule", "period")]
    numbers = {id(rule): str(number) for number, rule in enumerate(RULES, start=1)}

    def cell(row: tuple[str, str], column: tuple[str, str]) -> str:
        if row[0] == column[0]:
            return ""
        rule = conflict_between(*row, *column)
        return "yes" if rule is None else f"no ({numbers[id(rule)]})"

    rows = [(f"{choice}: `{kind}`", *(cell((choice, kind), column) for column in columns)) for choice, kind in pairs]
    heads = ("", *(f"{choice}: `{kind}`" for choice, kind in columns))
    reasons = "".join(
        f"{numbers[id(rule)]}. {rule.choice} `{rule.kind}` and "
        f"{'; '.join(f'{other} {_kinds(kinds)}' for other, kinds in rule.excludes.items())}: {rule.why}.\n"
        for rule in RULES
    )
    return f"{_table(heads, rows)}\nThe numbers refer to this list of exclusions; all other pairs can be combined:\n\n{reasons}"


def _kinds(kinds: Sequence[str]) -> str:
    return ", ".join(f"`{kind}`" for kind in kinds)


def readme_with_methods(readme: str) -> str:
    """Return `readme` with a new table of methods between its two marks."""
    return _between(readme, METHODS_BEGIN, METHODS_END, methods_table())


def methods_page_with_composition(page: str) -> str:
    """Return `page` with a new table and list of combinations between its two marks."""
    return _between(page, COMPOSITION_BEGIN, COMPOSITION_END, composition_table())


def _between(text: str, begin: str, end: str, written: str) -> str:
    before, _, rest = text.partition(begin)
    _, _, after = rest.partition(end)
    return f"{before}{begin}\n\n{written}\n{end}{after}"


def _chosen(method: str) -> dict[str, Any]:
    """Return a method's choices by key: those of `sync`, and those of `optim`, if it has any."""
    inner = inner_preset(method)
    return METHODS[method].PRESET | ({"optim": inner} if inner else {})


def _presets() -> str:
    rows = [
        (
            f"`{name}`",
            "<br>".join(f"`{key}:` {in_code(value)}" for key, value in _chosen(name).items()),
            method.PAPER,
        )
        for name, method in METHODS.items()
    ]
    return PRESETS + _table(("method", "preset", "paper"), rows)


def _table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [heads, ["---"] * len(heads), *rows]
    return "".join(
        "| " + " | ".join(" ".join(cell.replace("|", "\\|").split()) for cell in line) + " |\n" for line in lines
    )


def main() -> None:
    """Write docs/recipes.md, recipes/schema.json and the generated tables in README and docs/methods.md."""
    PAGE.write_text(recipe_reference(), encoding="utf-8")
    README.write_text(readme_with_methods(README.read_text(encoding="utf-8")), encoding="utf-8")
    METHODS_PAGE.write_text(methods_page_with_composition(METHODS_PAGE.read_text(encoding="utf-8")), encoding="utf-8")
    SCHEMA.write_text(schema_text(), encoding="utf-8")
    print(f"wrote {PAGE}, {SCHEMA} and the tables in {README} and {METHODS_PAGE}")


if __name__ == "__main__":
    main()
