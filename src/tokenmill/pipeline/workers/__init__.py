"""The processes of a run: which one runs which task, and what the user sees."""
