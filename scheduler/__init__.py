"""Every decision, without I/O: who takes part, where slices live, and when they travel.

In BytePS "scheduler" names the coordinator process; here the folder holds both deciders. The one
module with I/O is coordinator.py, the process that runs the deciders of membership.
"""
