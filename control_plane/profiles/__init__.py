"""Host profiles: which settings a machine needs, and how it gets there. An assigned machine
is switched to the profile of its entitlement, and used only once the profile was verified.
One that cannot reach it is put aside.
"""
