"""Models: which artifacts there are, loaded and warm versions of them, and the one door to run them."""
