"""What happened, how sure are we, at what price."""
