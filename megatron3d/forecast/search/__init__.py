"""Search for the fastest layout of a run that fits in memory."""
