"""Rows to arrays: copy the tokens of rows into the memory of batches, and derive what follows from their documents."""
