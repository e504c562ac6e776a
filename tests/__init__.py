"""The tests, and what several folders of them share."""

from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
"""The repository."""
