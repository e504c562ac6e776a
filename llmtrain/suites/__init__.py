"""Evaluation suites: their tasks and texts, the task files for local data, and the requirements of both."""
