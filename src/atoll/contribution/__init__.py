"""Who added how much to the model: one small file a way of sharing out."""
