"""Pipeline parallelism: a schedule is a list of actions per rank, which others check, lower, time and draw."""
