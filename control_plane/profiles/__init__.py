"""Host profiles: switches machines to the settings that their entitlements need.

An assigned machine is switched to the profile of its entitlement, and used only after the profile
was verified. A machine that cannot reach the profile is quarantined.
"""
