"""Models that answer a prompt with one vector: embeddings and classification, over encoders and decoders."""
