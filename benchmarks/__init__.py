"""The developers' measurements: ours against Gloo and raw probes, in one run (docs/performance.md)."""
