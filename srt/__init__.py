"""Layer 0, the contract: settings, messages and errors that all processes share. It does not import torch."""
