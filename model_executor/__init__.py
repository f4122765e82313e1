"""Execution layer: a step's inputs in, next tokens out. It knows neither requests nor queues."""
