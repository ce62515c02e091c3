"""Infers over which mesh axes a value is whole, cut or partial, from one rank's program on meta tensors.

kinds.py: the types. operators.py: typing rules of torch's operators. watch.py: follows a rank's tensors. verbs.py:
typing rules of collectives. check.py: checks a run's layout and refuses a plug-in's wrong sum before ranks start.
"""
