"""The same test bodies on the fake machine and on real ones."""
