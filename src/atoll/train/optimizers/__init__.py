"""Local optimisers."""
