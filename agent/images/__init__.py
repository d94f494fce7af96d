"""Images: fetched, checked, unpacked, kept; and the root file systems made from them."""
