"""The driver of a simulated federation, and what only a simulation knows."""
