"""The ground truth of each case. Nothing here imports g4debug."""
