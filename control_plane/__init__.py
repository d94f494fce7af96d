"""The control plane: decides what runs where, for a region.

`api` holds the wire types, `core` every decision, `store` what must survive, `services` the
actors of the paper (broker, allocator, scheduler, …), `server` the front end, `cli` the
command `twinectl`, `daemon` wires them together. It knows an agent only by `agent.api` and
`agent.client`.
"""
