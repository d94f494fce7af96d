"""Identity of hosts, users, components and tasks, and the rights of users.

The region has its own certificate authority. A host joins with a one-time token that is bound to
its name.
"""
