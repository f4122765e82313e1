"""Comparison with other servers: their model files, start-up, observation and workloads."""
