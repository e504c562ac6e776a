"""The documentation and its generator."""
