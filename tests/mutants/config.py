"""Mistakes in llmtrain/config."""

TABLES = {
    "llmtrain/config/data.py": r"""
    seen by unit/test_text_list.py
        lists: an entry does not inherit the keys of data
          - return {**shared, **named, **entry}
          + return {**named, **entry}
    """,
    "llmtrain/config/recipe.py": r"""
    seen by unit/test_recipe.py
        config: tokens are rounded up to whole steps
          - else (self.tokens or 0) // self.tokens_per_step
          + else -(-(self.tokens or 0) // self.tokens_per_step)
    """,
    "llmtrain/config/section.py": r"""
    seen by unit/test_recipe_wrong.py
        recipes: a number stands for a period in seconds
          - return {"kind": "steps", "every": value}
          + return {"kind": "seconds", "every": value}
    seen by unit/test_recipe.py
        recipe: a period of 1e1 is refused
          -     value = _count(value)
          -
        recipe: mappings of different kinds are merged
          - if both and not other_kind else value
          + if both else value
    seen by unit/test_wrong_commands.py
        config: a path that is too long is accepted
          -     if is_too_long(path):
          -
          +     if not path:
          +
    """,
    "llmtrain/config/sync.py": r"""
    seen by distributed/test_rounding_errors.py, SCENARIOS
        build: Local SGD sends rounded parameters, not differences
          - return self.kind != "fp32"
          + return False
    """,
    "llmtrain/config/sync_schedules.py": r"""
    seen by unit/test_plan_memory.py
        plan: WAGMA's models in CPU memory are not counted
          - models_in_cpu_memory: ClassVar[int] = 2
          + models_in_cpu_memory: ClassVar[int] = 0
    """,
}
