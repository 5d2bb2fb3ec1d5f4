"""Batches from raw text while it is being tokenized."""
