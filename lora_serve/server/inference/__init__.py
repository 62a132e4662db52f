"""One request for inference: names resolved, prompts tokenised, rows admitted and submitted, events read back."""
