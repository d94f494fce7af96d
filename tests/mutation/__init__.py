"""Mutants drawn by a seed: small changes of the code, which tests must notice (`make mutants`).

`sites` finds where code can be changed and writes all drawn changes into a copy of the tree, each
behind a switch. `judge` turns on one at a time. Tests are collected once, and each mutant is a
fork of that process, so judging one costs no more than the tests that reach it.
"""
