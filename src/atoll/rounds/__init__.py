"""Who is asked, and when a round is over."""
