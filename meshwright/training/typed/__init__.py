"""Inference, from one rank's program on meta tensors, of the mesh axes that hold a value whole, cut or partial.

sharding.py: the types. operators.py: typing rules of torch's operators. watch.py: follows a rank's tensors. verbs.py:
typing rules of collectives. check.py: checks a run's layout and refuses a plug-in's wrong sum before ranks start.
"""
