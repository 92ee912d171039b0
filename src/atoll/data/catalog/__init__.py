"""The catalogue of data sets, one file for each; downloaded files are verified by checksums."""
