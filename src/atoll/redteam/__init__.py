"""The red team: what probes get out of a plan, judged with the truth that they never see."""
