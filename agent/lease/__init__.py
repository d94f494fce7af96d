"""The lease of a host: which control plane commands it, and how long tasks run without one."""
