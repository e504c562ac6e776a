"""Methods side by side under the same conditions: a virtual cluster, faults, a list of runs, and the report about them."""
