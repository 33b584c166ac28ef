"""Where code runs: leased sandboxes for what a policy wrote, killable workers for our own code."""
