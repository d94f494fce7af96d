"""Elastic capacity: idle machines are lent, and are back in time (the paper's §6.1 and §7.2).

It owns what is counted of loans, and the histories of use. Loans themselves are in the machines'
records, which the brokers own.
"""
