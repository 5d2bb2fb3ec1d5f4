"""The state that a run keeps on disk: finished tasks, locks, the copy in a bucket, and the manifest at the end."""
