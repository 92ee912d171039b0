"""Run records, plots and the HTML report."""
