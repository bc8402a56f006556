"""Networks: one decoder for every family, its cache and attention, and image tokenizers."""
