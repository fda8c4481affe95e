"""A recipe resolved: what it starts from, learns from, runs on and costs, found once and checked once."""
