"""From token lists to the int32 arrays of one round. Pure numpy; no torch, no device, no cache.

tree -> a forest of shared prefixes; stream -> rows, levels and lookups of one round (`RoundPlan`);
visibility -> who may attend to whom, the oracle that tests build on; buckets -> lengths and cuts.
"""
