"""Update rules on flat buffers (AdamW), learning-rate schedules, precision and the loss scale."""
