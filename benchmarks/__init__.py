"""Measurements for developers: ours against Gloo and raw probes, in one run."""
