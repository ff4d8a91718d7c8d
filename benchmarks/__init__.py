"""zeroweave beside its peers: the same model code, data and machine, one implementation after the other."""
