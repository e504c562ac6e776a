"""Launcher that starts a recipe's ranks on one or more nodes: launch/train.sh."""

from llmtrain.launch.nodes import local_world_size
from llmtrain.launch.torchrun import launch_torchrun

__all__ = ["launch_torchrun", "local_world_size"]
