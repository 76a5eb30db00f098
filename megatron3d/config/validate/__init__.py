"""Rules that a valid configuration meets, one module per subject."""
