"""vision-layer: a layer of the vision tower in four launches."""
