"""Identity of hosts, users, components and tasks. An authority of its own signs certificates for
hosts, users and components. A host joins with a one-time token that is bound to its name.
"""
