"""Which axes hold a value whole, cut or partial: found of a rank's program on meta tensors, before ranks start.

kinds.py: what is said of a value. operators.py: what torch's operators make of it. watch.py: follows a rank's tensors.
verbs.py: what the verbs between ranks make of it. check.py: a run's layout, a plug-in's wrong sum refused.
"""
