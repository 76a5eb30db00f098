"""Pipeline parallelism: a schedule is a list of actions per rank, validated, lowered, simulated, run, drawn."""
