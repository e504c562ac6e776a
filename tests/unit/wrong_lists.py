"""Wrong lists of texts for test_recipe_wrong.py: an override, and parts of the one line that refuses it."""

from __future__ import annotations

WRONG_LISTS = [
    ("data.sources=[{source: a, wieght: 2}]", ["data.sources[0].wieght is not a key", "data.sources[0].weight?"]),
    ("data.sources=[{source: a}, {weight: 2}]", ["data.sources[1].source is not given", "text, as in `data.source`"]),
    ("data.sources=[{source: a, weight: 0}]", ["data.sources[0].weight is 0", "a number greater than 0"]),
    ("data.sources=[{source: a, weight: -1}]", ["data.sources[0].weight is -1", "a number greater than 0"]),
    ("data.sources=[{source: a, weight: .nan}]", ["data.sources[0].weight is NaN", "expected a finite number"]),
    (
        "data.sources=[{source: a, weight: 1.0e+306}]",
        ["data.sources[0].weight is 1e+306", "less than or equal to 1000000000"],
    ),
    ("data.sources=[{source: a, weight: much}]", ['data.sources[0].weight is "much"', "expected a number"]),
    (
        "data={sources: [{source: a}, {source: b}], validation_fraction: 1.5}",
        ["command line: data.validation_fraction is 1.5", "expected a number less than 1"],
    ),
    ("data.sources=[a]", ['data.sources[0] is "a"', "expected a mapping of keys"]),
    ("data.sources=a", ['data.sources is "a"', "expected a list"]),
    ("data.sources.0.weight=2", ['data.sources is {"0": {"weight": 2}}', "expected a list"]),
    ("data.sources=[{source: x/a.txt}, {source: y/a.txt}]", ["2 entries are called a", "its own name"]),
    ("data.sources=[{source: a, name: x/y}]", ['data.sources[0].name is "x/y"', "letters, digits"]),
    (
        "data.sources=[{source: a, weight: 0.01}, {source: b, weight: 40}]",
        ["a has weight 0.01 of 40.01", "one sequence in 1,000", "at least 0.04"],
    ),
    ("data={sources: [{source: a}], source: b}", ["data.source and data.sources are given", "expected one of"]),
    (
        "data={sources: [{source: a}], per_replica: [{source: b}]}",
        ["data.sources and data.per_replica are given", "expected one of"],
    ),
    (
        "data={sources: [{source: a}], packing: none}",
        ["data.packing is none, which needs one text", "data.sources is a list", "packing=packed"],
    ),
    (
        "data={sources: [{source: a}], shuffle: blocks}",
        ["data.shuffle is blocks, which needs one text", "use auto or all"],
    ),
    ("data.source=null", ["data.source is null", "expected one of data.source, data.sources and data.per_replica"]),
    ("data.per_replica=[{source: a}, {source: b}]", ["data.tokenizer is train:2048", "each site would train another"]),
    (
        "data={per_replica: [{source: a}], tokenizer: gpt2}",
        ["data.per_replica has 1 entry", "2 replicas", "replicas=1"],
    ),
    (
        "data={per_replica: [{source: a}, {source: b/a}], tokenizer: gpt2}",
        ["data.per_replica[1].source is 'b/a'", "another entry called a has 'a'", "names of their own"],
    ),
    ("data={per_replica: [{source: a, weight: 2}]}", ["data.per_replica[0].weight is not a key"]),
]
