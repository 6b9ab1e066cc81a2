"""Measurements, one command each; results go to benchmarks/results/ as JSON."""
