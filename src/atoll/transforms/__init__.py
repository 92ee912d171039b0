"""Transforms: codecs and other steps between an update and the payload that is sent, one file for each."""
