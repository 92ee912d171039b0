"""The local loop, evaluation and metrics."""
