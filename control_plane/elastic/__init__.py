"""Elastic capacity: idle machines are lent, and are back in time (the paper's §6.1 and §7.2).

It owns the counts of loans and the histories of use. The loans are in the machines' records, which
the brokers own.
"""
