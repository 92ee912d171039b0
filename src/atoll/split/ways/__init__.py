"""Ways of split learning: who trains when, one file for each."""
