"""What happens to an update on its way up."""
