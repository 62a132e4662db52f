"""Answers that are one vector per text: OpenAI's embeddings, and vLLM's classify, score and rerank."""
