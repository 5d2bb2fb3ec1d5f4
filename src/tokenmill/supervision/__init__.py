"""Supervised data: turn records into texts, and mark the characters that are trained on."""
