"""Retriever: one index, queries embedded in batches."""
