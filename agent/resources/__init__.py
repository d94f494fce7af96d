"""Resources of tasks: CPUs, memory, huge pages, limits."""
