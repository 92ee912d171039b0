"""What is learnt, by the kind of its targets; one small file a problem."""
