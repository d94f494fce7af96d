"""The agent: runs tasks on one machine, with or without a control plane.

Each folder is a room for one subject; its `core` has the pure decisions. `api` has the types of the
API, and `machine` all access to the kernel and to systemd. `server` and `cli` are the two ways in.
`composition` creates all services, and `daemon` runs them.
"""
