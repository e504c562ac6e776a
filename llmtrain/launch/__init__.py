"""Starting a recipe's ranks on one node or many: launch/train.sh."""

from llmtrain.launch.process_count import local_world_size
from llmtrain.launch.torchrun import launch_torchrun

__all__ = ["launch_torchrun", "local_world_size"]
