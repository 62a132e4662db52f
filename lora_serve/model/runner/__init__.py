"""The model runner: batches to packed tensors, one forward pass or a captured graph, logits to tokens."""
