"""How replicas agree: periods, penalties, outer steps, and their order. Sees tensors and groups, no models."""
