"""The plan of a run, made before any worker starts: inputs, tasks, ranks, memory."""
