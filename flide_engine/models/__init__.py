"""Decoders, one file a family: weights in, hidden vectors of the read rows out."""
