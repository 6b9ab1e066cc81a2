"""Memory that outlives a round: KV pages of one grain, recurrent and convolution states in
slots.
"""
