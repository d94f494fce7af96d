"""The capacity portal: who may use how much. It owns entitlements, their quotas and the
requests for more. What is granted is a promise, checked against what the region has (CP7).
"""
