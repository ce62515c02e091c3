"""Mistakes that are planted into the package's own text, and the tests that find them.

`python -m tests.plants` plants each of plants.yaml into a copy of the repository, runs the tests that are named beside
it, and writes which found it: the table of tests/plants/README.md. test_plants.py holds that each can still be planted.
"""
