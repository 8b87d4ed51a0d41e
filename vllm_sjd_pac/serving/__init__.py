"""People and HTTP: the images API and the demo page."""
