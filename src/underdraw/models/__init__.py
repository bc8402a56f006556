"""Model families: what tells one checkpoint's layout, prompts and weights from another's."""
