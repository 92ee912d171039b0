"""How what was dealt is skewed further: features, labels or sizes that differ from client to client."""
