"""Code that several benchmarks share. A benchmark may import this package, but not another benchmark."""
