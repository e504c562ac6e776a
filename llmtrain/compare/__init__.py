"""Comparison of methods under the same conditions: a virtual cluster, faults, a list of runs, and a report on them."""
