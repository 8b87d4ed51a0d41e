"""Emu3-Gen."""
