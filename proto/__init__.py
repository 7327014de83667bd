"""What goes over the wire: frames, control messages, dtypes and limits.

The wire's law is docs/wire.md. Only proto/transport/ touches sockets; everything else here is pure.
"""
