"""Work beside requests: tasks, threads in turns, transfers."""
