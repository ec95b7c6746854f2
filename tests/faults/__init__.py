"""Faults on purpose, between real processes: `python -m tests.faults [COUNT]`, or `make faults`.

Two guards, two relays and a server are processes of their own. This one is the network between them: it drops,
doubles, delays and reorders what they say, kills them with kill -9 in the middle of it, stops them, and spoils their
disks. After every fault these must hold: releases = distinct questions = ledger rows, no question answered with two
different bytes, nothing overspent. Every run must come to its end, and nothing that was started may be left behind.
"""
