"""The reference models that papers use."""
