"""Tokenizing: plan tasks, run one task, run them all, resume.

To follow one document, read `task.py` (what happens to it), then `plan.py` (which task it
is in), then `run.py` (what surrounds all tasks).
"""
