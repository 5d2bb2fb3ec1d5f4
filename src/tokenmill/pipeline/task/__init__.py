"""One task: read a span of text, encode it, write shards."""
