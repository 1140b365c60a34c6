"""A training loop watched while it runs: live, as a timeline, and for Prometheus."""
