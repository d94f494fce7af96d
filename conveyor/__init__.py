"""Continuous delivery: brings a new image to jobs in stages, with gates, and back if one fails.

`api` has the types, `pipeline_file` checks pipeline files, `core` decides, `push` is the only
module that changes a job, `gates` measures, `records` stores, `service` connects them, `server` and
`client` are its HTTP API, `cli` is `twine-conveyor`. docs/pipelines.md, docs/adr/0170.
"""
