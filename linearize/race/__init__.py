"""Several methods of conversion on one teacher, with equal tokens: methods.py says what they are, race.py runs them."""
