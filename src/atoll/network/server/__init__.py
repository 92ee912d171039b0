"""The server's side of a federation: HTTP, authentication, the store, the driver of runs, the operator."""
