"""Plans: what becomes what, decided before anything is written."""
