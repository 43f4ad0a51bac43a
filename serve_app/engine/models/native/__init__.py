"""Int8 inference on the CPU in C++, compiled on the machine that it runs on."""
