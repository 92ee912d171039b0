"""Ways to add in secret, one file each."""
