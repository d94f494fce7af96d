"""Elastic capacity: lends idle machines and gets them back in time (the paper's §6.1 and §7.2).

This room owns the counts of loans and the histories of use. The loans themselves are in the
machines' records, which the brokers own.
"""
