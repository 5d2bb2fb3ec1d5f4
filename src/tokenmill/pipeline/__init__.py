"""Text to store: plan the tasks, run them in many processes, write the manifest."""

PRELOAD = "tokenmill.pipeline.workers.worker:preload"
"""The function that worker processes call before their first task; as a string, it need not be imported here."""
GUESS_ENGINE = "tokenmill.pipeline.workers.engine_cache:guess"
"""The function that loads the engine for a tokenizer before the run has chosen one."""
