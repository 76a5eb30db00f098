"""Jobs under SLURM: checks before the ranks start, the decision to requeue after they end, and the job script."""
