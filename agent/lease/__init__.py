"""The lease of a host: who commands it, and how long a task may run unheard."""
