"""What a recipe will need before it is run: mesh, memory, traffic."""
