"""Mistakes planted into the package's own text, and the tests that find each mistake.

`python -m tests.plants` plants each mistake of plants.yaml into a copy of the repository, runs the mistake's tests, and
writes which tests found the mistake: the table of tests/plants/README.md. test_plants.py checks that each mistake can
still be planted.
"""
