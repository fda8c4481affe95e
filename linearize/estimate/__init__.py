"""What a recipe will cost, before it runs: memory by its parts, time, energy or price, disk; and changes that fit."""
