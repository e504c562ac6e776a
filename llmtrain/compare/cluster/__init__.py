"""Virtual cluster on one Linux machine: hosts (`hosts.py`), their limits, and switches that delay frames."""
