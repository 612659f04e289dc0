"""Tokens in, tokens out: the speculative engine. Imports neither Ray nor HTTP."""
