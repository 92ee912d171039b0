"""What bad clients do."""
