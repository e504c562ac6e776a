"""Starting a recipe's ranks on one node or many: launch/train.sh."""

from llmtrain.launch.processes import processes_here
from llmtrain.launch.torchrun import launch_torchrun

__all__ = ["launch_torchrun", "processes_here"]
