"""Jobs under SLURM: what is asked before the ranks start and after they have ended, and the file that is submitted."""
