"""Evaluation suites: their tasks and texts, the task files for local data, and checks of what they require."""
