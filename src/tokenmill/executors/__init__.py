"""Executors: where the worker processes of a run come from."""
