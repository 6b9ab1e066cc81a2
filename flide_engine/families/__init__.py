"""Decision families: requests to isolated prompts, and what is read of them to answers."""
