"""LlamaGen, class-conditional (c2i)."""
