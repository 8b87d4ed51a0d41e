"""Tree-masked attention over the paged KV cache, one module per platform."""
