"""`python -m llmtrain`."""

from llmtrain.cli import main

main()
