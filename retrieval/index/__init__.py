"""Where chunks and vectors live: embedded (``edge``) or on a Qdrant server (``server``)."""
