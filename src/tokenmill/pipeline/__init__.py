"""Text to store: plan the tasks, run them in many processes, write the manifest."""

PRELOAD = "tokenmill.pipeline.workers.worker:preload"
"""What worker processes call before their first task; named here so that naming it imports nothing."""
