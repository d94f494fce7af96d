"""The agent: runs tasks on one machine, with or without a control plane.

`api` holds the wire types, `core` every decision, `machine` every touch of the host,
`services` the loops between them, `server` and `cli` the two ways in, `daemon` wires
them together. `wire`, `errors` and `log` are shared with the other programs.
"""
