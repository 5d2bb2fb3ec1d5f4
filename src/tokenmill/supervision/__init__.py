"""Supervised data: records become texts of which only some characters are trained on."""
