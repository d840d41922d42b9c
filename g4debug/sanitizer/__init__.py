"""What runs on the device, and what it is compared with. The tracers with a kernel stand on it."""
