"""What a person types: one short file a command. Heavy parts are imported when a command runs."""
