"""JSON schema of recipe files, for editors.

A file may leave out keys that its base files, its method's preset or its own name provide, and it may use short forms. The schema
therefore requires no keys, and a value with a `kind` may be of any of its kinds. Loading a recipe checks that it is complete.
"""

from __future__ import annotations

import json
from typing import Any

from llmtrain.config import Recipe
from llmtrain.config.section import UNION_KEYS

BASE = {
    "anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}}, {"type": "null"}],
    "description": "Recipe files, relative to this one, whose values this one overrides.",
}


def file_schema() -> dict[str, Any]:
    """Return the JSON schema of a recipe file, which may have base files."""
    schema = _without_requirements(Recipe.model_json_schema())
    kinds = schema["$defs"]
    for section in schema["properties"].values():
        kinds[section["$ref"].rpartition("/")[2]]["type"] = ["object", "null"]  # all of its keys may be commented out
    schema["properties"] = {"base": BASE} | schema["properties"]
    sync = kinds["SyncSection"]["properties"]
    for key in UNION_KEYS:
        options = sync[key].pop("anyOf", None) or [{"$ref": sync[key].pop("$ref")}]
        sections = [kinds[option["$ref"].rpartition("/")[2]] for option in options]
        names = [name for section in sections for name in _kinds_of(section)]
        sync[key]["anyOf"] = [{"enum": names}, *options]
    sync["period"]["anyOf"].append({"type": "integer", "minimum": 1})
    kinds["EvalSection"]["properties"]["suite"]["anyOf"].append({"type": "string"})
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **schema, "title": "llmtrain recipe"}


def schema_text() -> str:
    """Return the schema as the text of a file."""
    return json.dumps(file_schema(), indent=1) + "\n"


def _kinds_of(section: dict[str, Any]) -> list[str]:
    kind = section["properties"]["kind"]
    return [kind["const"]] if "const" in kind else kind["enum"]


def _without_requirements(schema: Any) -> Any:
    """Return the schema without required keys, and with `anyOf` in place of `oneOf`."""
    if isinstance(schema, list):
        return [_without_requirements(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    if isinstance(text := schema.get("description"), str):  # editors would show each line as a paragraph
        schema = schema | {"description": "\n\n".join(" ".join(part.split()) for part in text.split("\n\n"))}
    dropped = {"discriminator"} | ({"required"} if isinstance(schema.get("required"), list) else set())
    return {
        "anyOf" if key == "oneOf" else key: _without_requirements(value)
        for key, value in schema.items()
        if key not in dropped
    }
