"""Layer 2, execution: it takes the inputs of a step and returns the next tokens. It knows no requests and no queues."""
