"""The client side of service discovery, for programs that do not call the front end.

It follows the addresses of jobs, and publishes them as DNS (`dns`) and as configuration of HAProxy
and nginx (`proxy`). While the control plane is unreachable it serves the last known addresses.
"""
