"""From token files or a Hugging Face dataset to the samples of a run."""
