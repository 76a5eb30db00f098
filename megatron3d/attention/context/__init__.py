"""Context parallelism: order of positions, and the exchanges of keys and values between context ranks."""
