"""The resource broker: which entitlement has which machine; one broker per data center.

It owns the machine records, their assignment, unavailability events, loans and holds (paper §2.2).
Other components follow its changes by listening, or by watching from a revision on.
"""
