"""Configuration: schema, derived numbers, reading and checking."""
