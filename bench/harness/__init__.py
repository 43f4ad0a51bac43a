"""Code that several benchmarks share. A benchmark imports this package, but no other benchmark."""
