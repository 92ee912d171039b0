"""Reference models from papers, one file for each."""
