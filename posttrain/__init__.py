"""posttrain: make a pre-trained language model better at hundreds of task domains at once."""

__version__ = "0.1.0"
