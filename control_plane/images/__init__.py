"""Images: what tasks run. They are pushed here once, checked by digest, and streamed to
machines. Nothing is visible before it is whole.
"""
