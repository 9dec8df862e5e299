"""What tests, demos and benchmarks need and a server does not."""
