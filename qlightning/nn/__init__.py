"""Layers of prepared and of converted models."""
