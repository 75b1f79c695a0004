"""shardmill: a ShareGPT-style dataset into token-exact, quality-checked training shards."""

__version__ = "0.1.0"
