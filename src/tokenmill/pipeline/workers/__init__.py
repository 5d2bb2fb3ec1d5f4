"""Which process runs which task, and what the user sees of it."""
