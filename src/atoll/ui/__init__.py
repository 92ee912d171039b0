"""The live page: runs and federations as they train, in a browser."""
