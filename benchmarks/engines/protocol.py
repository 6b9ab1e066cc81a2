"""What the processes of `benchmarks.engines` and `benchmarks.engine` agree on."""

MARK = "@@ "
"""Begins the lines that are answers; libraries print what they like on the others."""
