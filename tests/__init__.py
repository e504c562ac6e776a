"""Tests of llmtrain, and the path of the repository that they share."""

from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
"""Root folder of the repository."""
