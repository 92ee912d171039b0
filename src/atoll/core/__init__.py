"""The contracts that every room builds on; pure, and importing nothing else of Atoll."""
