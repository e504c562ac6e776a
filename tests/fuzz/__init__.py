"""Random wrong inputs of every kind, drawn from seeds: `python -m tests.fuzz --minutes 60`, and a few in the fast tests."""
