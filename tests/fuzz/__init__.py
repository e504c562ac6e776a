"""Fuzzing with random wrong inputs from seeds: `python -m tests.fuzz --minutes 60`. The fast tests try a few of each kind."""
