"""CUDA core dumps and addresses: which buffer, page, row and request. Needs no GPU and no CUDA."""
