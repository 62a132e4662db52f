"""Floor 5, doors: between words and token ids. Chat template, tokenizer, incremental detokenizer, stop strings."""
