"""The capacity portal owns entitlements, their quotas and the requests for more.

A grant is a promise, checked against the machines of the region (CP7).
"""
