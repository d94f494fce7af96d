"""One typed route table, from which server, client and OpenAPI document are made.

`routes` is the table's row, `server` turns rows and handlers into an aiohttp application,
`client` calls a row over TCP with mutual TLS or over a unix socket, `openapi` writes the
document. Both programs use it; neither knows the other's handlers.
"""
