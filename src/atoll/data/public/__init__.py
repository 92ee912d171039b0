"""Ways to take public samples from the data set itself, one file for each."""
