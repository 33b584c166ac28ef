"""Is it better? Held-out suites, honest comparisons, and the admission of domains."""
