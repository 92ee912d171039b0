"""Public samples that are made of the data set itself."""
