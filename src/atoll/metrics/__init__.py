"""What is measured of a model's scores; one small file a metric."""
