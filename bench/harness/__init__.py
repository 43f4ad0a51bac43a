"""Code that several benchmarks share. A benchmark imports this package and itself, and no other benchmark."""
