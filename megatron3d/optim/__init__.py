"""AdamW on flat buffers, learning-rate schedules, precision and the loss scale."""
