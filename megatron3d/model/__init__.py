"""The GPT: table of its parameters, their initial values, the modules, and closed forms of its FLOPs and size."""
