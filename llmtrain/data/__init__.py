"""Data pipeline from text to batches: sources, tokenizer, token shards on disk (prepare), batch order (loader)."""
