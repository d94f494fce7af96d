"""The same test bodies run on the fake machine and on real machines."""
