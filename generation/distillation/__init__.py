"""Raising α: data from the target, a small draft, training, and what the draft is worth offline."""
