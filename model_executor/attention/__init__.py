"""Attention backends behind one interface."""
