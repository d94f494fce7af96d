"""The clients' side of service discovery, for programs that do not speak to the front end.

It follows where jobs answer, tells it as DNS (`dns`) and as configuration of HAProxy and nginx
(`proxy`), and goes on with what it knew last while the control plane is away.
"""
