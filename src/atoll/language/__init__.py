"""What becomes of a language model after training: adapters and merged models that other programs load."""
