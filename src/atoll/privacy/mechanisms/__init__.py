"""What protects whom, one file a mechanism."""
