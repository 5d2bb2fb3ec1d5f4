"""Rows: token stores cut, ordered and mixed into training sequences, as arithmetic and without copying.

    documents --pack--> rows --shuffle--> rows --mix--> rows

A dataset is frozen and random access: `len` is one epoch, and an index past the end is the next epoch,
so a place in training is one integer.
"""
