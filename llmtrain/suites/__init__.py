"""What can be evaluated: suites of tasks and texts, the task files that read local data, and what either needs."""
