"""Run the real training step to check a layout: as a dry run, or compared with one process."""
