"""A fleet for real: agents' trajectories replayed against several replicas, some of which die, join
or leave, beside one replica that remembers everything. `python -m benchmarks.fleet --help`.
"""
