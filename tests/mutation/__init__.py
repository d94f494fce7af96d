"""Seeded mutants: small changes of the code that tests must notice (`make mutants`).

`sites` finds where code can change. It writes all drawn changes into a copy of the tree, each
behind a switch. `judge` turns on one switch at a time.

Tests are collected once, and each mutant runs in a fork of that process. So judging a mutant costs
only the tests that reach it.
"""
