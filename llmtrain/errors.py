"""Errors that a user can act on.

Each message is one line: what was given, what was expected, what to change. Everything else (a failed
assert, an exception of a library) is a defect or a broken machine and keeps its traceback.
"""

DONE, FAILED, BAD_USAGE, STOPPED_EARLY = 0, 1, 2, 3
"""Exit codes: finished · failed · bad recipe or usage · stopped early with a checkpoint (start again to continue)."""


class UserError(ValueError):
    """Something the user gave can't be used as it is; the command ends with exit code 2."""


class RecipeError(UserError):
    """A key of the recipe is unknown, has a wrong value, or contradicts another."""


class DataError(UserError):
    """A data source, tokenizer or token shard is missing, damaged or of the wrong kind."""


class ModelError(UserError):
    """A model configuration can't be built, initialised or cut into blocks."""


class CheckpointError(UserError):
    """A checkpoint is damaged or belongs to another recipe."""


class TrainingError(RuntimeError):
    """Training can't go on (non-finite loss, a peer that is gone); the command ends with exit code 1."""
