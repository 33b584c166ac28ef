"""Is it right? Layers of checks over what an attempt said and left."""
