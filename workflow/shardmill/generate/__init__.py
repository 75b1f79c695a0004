"""Generate: the prompts of a shard to completions, whatever the servers do."""
