"""The gate: every question of a request equals its isolated prompt, whatever else is computed
beside it.
"""
