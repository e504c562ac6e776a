"""`llmtrain doctor`: checks that find what would keep a run from working before it starts.

Each module checks one area and returns findings; `run_checks` calls them in order and prints the report.
"""
