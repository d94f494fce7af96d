"""The control plane: decides what runs where, for a region.

Each folder is a room: one box of the paper (broker, allocator, scheduler, …) with its decisions
in `core/`. Below the rooms are `api` (wire types), `store` (durable records) and `runtime` (clocks,
workers, tables). Above them are `front_end`, the command `twinectl` in `cli`, and `roles` and
`daemon`, which connect everything. It knows an agent only by `agent.api` and its client.
"""
