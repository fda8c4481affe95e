"""Training: the stages of a recipe, from a converted model to a saved one."""
