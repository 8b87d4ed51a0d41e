"""Models of the Chameleon architecture: Lumina-mGPT and Anole."""
