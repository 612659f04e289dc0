"""Files to documents, through maintained parsers."""

from retrieval.loaders.files import Loader, LoadFailure, expand_paths

__all__ = ["LoadFailure", "Loader", "expand_paths"]
