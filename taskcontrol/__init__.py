"""The library with which an application approves operations on its tasks.

    api.py          what the scheduler asks, and what it is answered (paper §2.5, Figure 8)
    quorum.py       ready controllers, each a decision of a request: members of an ensemble,
    shards.py       … replicas of shards,
    stateless.py    … tasks that are all alike, faster while there is little to do,
    windows.py      … and hours in which nothing is done
    observations.py       what controllers ask the application: its leader, how busy it is
    config.py       a controller that is written in a file instead of code
    server.py       any of them over HTTP with mutual TLS
    cli.py          `twine-taskcontroller`

`docs/taskcontrol.md` is the guide. Of the rest of Twine this needs `wire` (routes, TLS) and
`wire.errors` alone.
"""
