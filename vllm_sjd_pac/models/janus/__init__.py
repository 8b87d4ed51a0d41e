"""Janus-Pro, image generation only."""
