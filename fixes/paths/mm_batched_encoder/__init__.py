"""mm-batched-encoder: all images of a request through the vision tower together."""
