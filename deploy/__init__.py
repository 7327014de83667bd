"""Starting and looking at gradsum's processes: launcher, status, doctor, benchmarks."""
