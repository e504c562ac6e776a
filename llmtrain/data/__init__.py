"""Text to batches: sources -> tokenizer -> token shards on disk (prepare) -> who reads what (loader)."""
