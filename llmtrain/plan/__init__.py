"""Estimates of what a recipe needs, made before it runs: mesh, memory, traffic and time."""
