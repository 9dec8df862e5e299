"""Trains the tiny K3 of examples/: corpus, tokenizer, the model's training form, loop and export."""
