"""`llmtrain doctor`: checks that find, before a run starts, the problems that would keep it from working.

Each module checks one area and returns findings; `run_checks` calls them in order and prints the report.
"""
