"""Split learning: a model is cut between clients and server, which exchange activations and gradients."""
