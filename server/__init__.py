"""The summation service: CPU processes that only add tensors.

adder adds bytes, slot holds one slice's rounds, engine is the protocol without I/O, shard is the
thread that gives it sockets, daemon the process around the shards.
"""
