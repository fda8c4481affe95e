"""A model folder on disk: its source, its shards, its code, its card, and who wrote it."""
