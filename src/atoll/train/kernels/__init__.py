"""Kernels in C for chains of linear and convolutional layers, compiled where a compiler is there and never needed."""
