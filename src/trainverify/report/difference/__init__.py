"""What changed between two plans, two programs or two reports, for reviews."""
