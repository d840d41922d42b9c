"""rank-divergence: finds tensor-parallel ranks that do not do the same work."""
