"""The GPT, written once: its parameters as a table, their initial values, the modules, and its closed forms."""
