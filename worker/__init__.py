"""The client inside a training process.

core is the protocol without I/O, comm the one thread that owns every socket, session what the
training thread sees; the torch front end (api, optimizer, broadcast) stands on the session.
"""
