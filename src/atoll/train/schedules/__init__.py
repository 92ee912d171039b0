"""How the learning rate changes with the rounds."""
