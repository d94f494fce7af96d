"""Host profiles: the settings that a machine needs, and the switch to them.

An assigned machine is switched to the profile of its entitlement, and used only once the profile
was verified. A machine that cannot reach it is quarantined.
"""
