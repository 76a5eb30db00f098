"""Run the real training step to check a layout: as a dry run, or against one process."""
