"""Runs drawn at random over every axis of the config, each compared with one device.

`python -m tests.fuzz --minutes 30` draws runs until the time is up. test_fuzz.py runs a fixed set that covers every
pair of values, and all runs that failed before.
"""
