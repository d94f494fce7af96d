"""What every program of Twine shares: HTTP over TLS from route tables, errors, logs and units.

`routes` is the table's row, `server` turns rows and handlers into an aiohttp application,
`client` calls a row over TCP with mutual TLS or over a unix socket, `openapi` writes the
document. `errors` has every failure that is raised on purpose. A leaf: it imports no program
(docs/adr/0127-what-all-programs-share-is-a-leaf.md).
"""
