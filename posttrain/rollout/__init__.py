"""How an attempt is made: rendering, the attempt's state machine, executors, groups."""
