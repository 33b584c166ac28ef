"""What is practised: domains, the catalogue of them, and the mixture a run draws from."""
