"""The scheduler on virtual time: the real queue, credit and layout over a model of links."""
