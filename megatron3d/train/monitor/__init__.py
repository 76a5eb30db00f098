"""What is observed of a run while it trains."""
