"""The process and its machine: several processes, signals, hangs, hardware."""
