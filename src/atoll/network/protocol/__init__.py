"""What clients and server must agree on: messages, endpoints, identities, objects in chunks."""
