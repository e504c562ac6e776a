"""The mesh, counted collectives, and the engines that run one replica."""
