"""Text in, scored passages out: loading, chunking, embedding, hybrid search, reranking, evaluation."""
