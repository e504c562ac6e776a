"""The device mesh, collectives that count their traffic, and the engines that run one replica."""
