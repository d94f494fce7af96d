"""Images that tasks run from. They are pushed here once, checked by digest, and streamed to
machines. An image is visible only when it is complete.
"""
