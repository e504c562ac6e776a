"""Launcher that starts a recipe's ranks on one or more nodes: launch/train.sh."""
