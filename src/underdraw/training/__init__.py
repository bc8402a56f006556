"""Training of the tiny family (data, image tokenizer, model, drafter) and of drafters for any family."""
