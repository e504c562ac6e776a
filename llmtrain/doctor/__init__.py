"""`llmtrain doctor`: checks that find the problems of a run before it starts.

Each module checks one area and returns findings; `run_checks` calls them in order and prints the report.
"""
