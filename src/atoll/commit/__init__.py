"""The server's side of a round, for every driver."""
