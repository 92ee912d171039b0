"""Rules on what goes together in a plan: one table, each rule with its reason, the way out and examples."""
