"""Code that all programs of Twine share: HTTP over TLS from route tables, errors, logs and units.

`routes` defines a row of a route table, `server` makes an aiohttp application of rows and
handlers, `client` calls a row over TCP with mutual TLS or over a unix socket, `openapi` writes the
API document. `errors` has every failure that is raised on purpose. This package imports no
program (docs/adr/0127-what-all-programs-share-is-a-leaf-package-wire.md).
"""
