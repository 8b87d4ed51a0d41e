"""Image-token model families: network, token layout, prompts, pixel decoder."""
