"""What a client may do with a task."""
