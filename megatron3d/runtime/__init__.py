"""From a started process to a rank: launcher environment, devices, signals, watchdog, exit codes."""
