"""Image tokenizers (FSQ, VQGAN, MoVQ) and the text tokenizer of the tiny family."""
