"""What a run wrote into its folder, as curves and as a page."""
