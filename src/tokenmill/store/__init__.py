"""The store: shards on disk, the manifest that describes them, and reading them back."""
