"""Rules that a configuration must keep: one module per subject."""
