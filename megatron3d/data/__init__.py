"""Data: text to token files, token files to shuffled samples, samples to microbatches."""
