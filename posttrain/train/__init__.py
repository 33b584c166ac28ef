"""How do the weights change? Advantages, packing, one policy loss, optimiser, checkpoints."""
