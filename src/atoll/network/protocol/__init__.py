"""What both sides of a network speak."""
