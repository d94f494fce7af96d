"""The control plane: decides what runs where, for a region.

Each folder is a room: one box of the paper (broker, allocator, scheduler, …) with its decisions
in `core/`. Below them lie `api`, the wire types, `store`, what must survive, and `runtime`, what
actors run on; above them `front_end`, the command `twinectl` in `cli`, and `roles` and `daemon`,
which wire all of it together. It knows an agent only by `agent.api` and its client.
"""
