"""The embedded decision model: its tokenizer, training, export and evaluation."""
