"""A real federation: server and clients of several organisations over HTTPS."""
