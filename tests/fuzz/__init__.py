"""Runs drawn at random over every axis of the config, each held against one device.

`python -m tests.fuzz --minutes 30` draws as many as fit; test_fuzz.py runs a fixed set that covers every pair of
values, and what was found before.
"""
