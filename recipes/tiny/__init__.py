"""The recipe of the embedded model: data, image tokenizer, decoder and grading, as scripts."""
