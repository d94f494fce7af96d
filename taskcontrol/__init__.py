"""The library with which an application approves operations on its tasks.

    api.py          requests of the scheduler, and responses (paper §2.5, Figure 8)
    quorum.py       ready-made controller for members of an ensemble
    shards.py       ready-made controller for replicas of shards
    stateless.py    ready-made controller for identical tasks, faster at low load
    windows.py      times in which no operation begins, for any controller
    observations.py queries to the application: its leader, its shards, its load
    config.py       a controller from a configuration file instead of code
    server.py       serves a controller over HTTP with mutual TLS
    cli.py          `twine-taskcontroller`

`docs/taskcontrol.md` is the guide. Of the rest of Twine this package needs only `wire`.
"""
