"""Mistakes in docs."""

TABLES = {
    "docs/python_packages.py": r"""
    seen by unit/test_python_files.py
        python: the list forgets a required package
          - if name.startswith(CUDA) or
          + if name.startswith((*CUDA, "torch")) or
    """,
}
