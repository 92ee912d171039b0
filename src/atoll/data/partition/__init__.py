"""How data are dealt out to clients."""
